"""Find a checkpoint: a local directory, or a repository of the Hugging Face hub that is downloaded into its cache.

In: a directory, or `owner/name`, or `owner/name@revision`.
Out: a local directory, and what to call it in the provenance.
Source: huggingface_hub (comes with transformers); it keeps what it has downloaded and resumes what was interrupted.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

# what conversion reads, or refuses (a mask embedding of its own): no other framework's weights, no code
_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "tokenizer.model", "mask_embedding.pt")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w.-]+)?")


def find_directory(name: Path | str) -> tuple[Path, str]:
    """The local directory of a checkpoint, and its name: the directory's own, or `owner/name@commit`.

    What exists locally is never looked up. Raises FileNotFoundError if the name is neither a directory nor a repository's, or cannot be
    downloaded.
    """
    path = Path(name)
    if path.exists() or not _REPOSITORY.fullmatch(str(name)):
        return path, path.resolve().name
    repository, _, revision = str(name).partition("@")
    try:
        found = Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{name} is no local directory and could not be downloaded from the hub ({reason}); "
            "download it elsewhere and give its directory, or set HF_TOKEN for a repository that asks for a licence."
        ) from error
    return found, f"{repository}@{found.name}"
