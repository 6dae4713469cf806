"""Embedded pairs: a target and its drafter, small enough to ship with the package.

In: the name of an embedded pair, or a directory.
Out: Models, or the directory (in the layout of `checkpoint`) they come from.
Source: each pair's provenance.json.
"""

from pathlib import Path
from typing import Any

from reanchor_jax import checkpoint
from reanchor_jax.models.drafter import Models

_ROOT = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Names of the embedded pairs, sorted."""
    return tuple(sorted(config.parent.name for config in _ROOT.glob("*/target_config.json")))


def path(name_or_directory: Path | str) -> Path:
    """Directory of an embedded pair, or the given directory itself; a name of a pair wins over a directory of that name (write ./NAME).

    Raises FileNotFoundError listing the embedded pairs if it is neither.
    """
    if str(name_or_directory) in names():
        return _ROOT / str(name_or_directory)
    directory = Path(name_or_directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{str(name_or_directory)!r} is neither a directory nor an embedded pair; embedded are: {', '.join(names()) or 'none'}."
        )
    return directory


def load_pair(name_or_directory: Path | str, *, dtype: Any = None, sharding: checkpoint.Shardings = None) -> Models:
    """Load an embedded pair by name, or any directory in the layout of `checkpoint`; arguments and errors as there."""
    return checkpoint.load(path(name_or_directory), dtype=dtype, sharding=sharding)
