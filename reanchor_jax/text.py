"""Text to token ids: tokenizer, chat template, prompts files; and files that are written whole or not at all.

In: a directory with tokenizer files; text; a JSONL file of prompts.
Out: token ids.
Source: Hugging Face tokenizers, loaded without PyTorch.
"""

import json
import os
import reprlib
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reanchor_jax.files import read_json


class Prompt(NamedTuple):
    """One prompt. id: its name in results. text: None where only ids were given. ids: token ids, at least one."""

    id: str
    text: str | None
    ids: list[int]


def pad_prompts(prompts: Sequence[Sequence[int]], *, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [N P] of prompts, filled up with 0 to the longest or to `length`, and their lengths [N]; both int32."""
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), length or int(lengths.max())), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


def load_tokenizer(directory: Path | str) -> Any:
    """Load the tokenizer of a directory; None if it has none. Raises ValueError if its files cannot be read."""
    directory = Path(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    transformers = _import_transformers()
    try:
        # a tokenizer.json says everything; without a config.json beside it the class cannot always be guessed
        if (directory / "tokenizer.json").is_file() and not (directory / "tokenizer_config.json").is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"the tokenizer of {directory} cannot be read ({reason}); copy its files again.") from error


def encode(tokenizer: Any, text: str, *, is_chat: bool = False) -> list[int]:
    """Token ids of a text, with the special tokens its tokenizer adds; is_chat wraps it as a user's message by the chat template.

    Raises ValueError if there is no tokenizer, no chat template, no text, or if the text is not valid Unicode.
    """
    return encode_turns(tokenizer, [text], is_chat=is_chat)


def encode_turns(tokenizer: Any, turns: Sequence[str], *, is_chat: bool, thinking: bool | None = None) -> list[int]:
    """Token ids of a conversation, user and model by turns; without is_chat its texts are joined, a blank line between.

    thinking: `enable_thinking` of the chat template; None: as the template has it. Raises ValueError as `encode`, and if thinking is
    given where no template asks for it.
    """
    if tokenizer is None:
        raise ValueError("the model directory has no tokenizer, so text cannot be read; give a prompts file with ids.")
    text = "\n\n".join(turns)
    if not text:
        raise ValueError("the prompt is empty; give some text, or the begin token in a prompts file with ids.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid UTF-8 text ({error.reason} at character {error.start}); fix its encoding.") from error
    if thinking is not None and not is_chat:
        raise ValueError("thinking is a chat template's; leave out --thinking, or give --chat.")
    if not is_chat:
        return list(tokenizer.encode(text, verbose=False))
    messages = [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return encode_messages(tokenizer, messages, thinking=thinking)


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, thinking: bool | None = None) -> list[int]:
    """Token ids of a conversation, by the chat template, up to where the model answers. messages: of a role and a content each.

    Raises ValueError if there is no tokenizer or template, for what the template refuses, and for `thinking` where it knows none.
    """
    if tokenizer is None:
        raise ValueError("the model directory has no tokenizer, so text cannot be read; give a prompts file with ids.")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; leave out --chat, or give the prompt as text.")
    if thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError("the tokenizer has no chat template that knows enable_thinking; leave out --thinking.")
    if wrong := [message for message in messages if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys()]:
        raise ValueError(f"messages must have a role and a content each; got {reprlib.repr(wrong[0])}.")
    asked = {} if thinking is None else {"enable_thinking": thinking}
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **asked)
    except Exception as error:  # templates raise what they like, jinja2's TemplateError mostly
        raise ValueError(f"the chat template refuses the messages ({error}); give them as its model card shows.") from error
    return list(ids)


def read_prompts(path: Path | str, tokenizer: Any, *, vocab_size: int, limit: int | None = None, is_chat: bool = False) -> list[Prompt]:
    """Read a JSONL file of objects with `prompt` (text) or `ids` (token ids) and optionally `id`; `limit` takes the first ones.

    Raises ValueError naming file, line and rule; FileNotFoundError if there is no such file.
    """
    prompts: list[Prompt] = []
    for place, line in read_lines(path):
        if len(prompts) == limit:
            break
        record = parse_record(line, place)
        has_text, has_ids = "prompt" in record, "ids" in record
        if has_text == has_ids:
            raise ValueError(f"{place} must hold either prompt (text) or ids (token ids); it holds {'both' if has_text else 'neither'}.")
        identifier = record.get("id", len(prompts))
        if not isinstance(identifier, (str, int)):
            raise ValueError(f"{place}: id must be a string or a number; got {identifier!r}.")
        if any("\ud800" <= character <= "\udfff" for character in str(identifier)):  # which JSON can spell and no file can hold
            raise ValueError(f"{place}: id is not valid Unicode text; got {identifier!r}.")
        if has_ids:
            ids, text = record["ids"], None
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise ValueError(f"{place}: ids must be a list of whole numbers; got {str(ids)[:60]}.")
            if not ids:
                raise ValueError(f"{place}: ids is empty; a prompt needs at least one token.")
        else:
            text = record["prompt"]
            if not isinstance(text, str):
                raise ValueError(f"{place}: prompt must be text; got {text!r}.")
            try:
                ids = encode(tokenizer, text, is_chat=is_chat)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        wrong = [token for token in ids if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{place}: token id {wrong[0]} lies outside the target's vocabulary 0..{vocab_size - 1}.")
        prompts.append(Prompt(id=str(identifier), text=text, ids=ids))
    if not prompts:
        raise ValueError(f"{path} holds no prompts; write one JSON object a line.")
    return prompts


def read_texts(path: Path | str) -> list[str]:
    """Read the `prompt` texts of a JSONL file. Errors as in `read_prompts`."""
    texts = []
    for place, line in read_lines(path):
        text = parse_record(line, place).get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place} must hold prompt, a text that is not empty; got {text!r}.")
        texts.append(text)
    if not texts:
        raise ValueError(f"{path} holds no texts; write one JSON object a line.")
    return texts


def read_lines(path: Path | str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a UTF-8 file that are not blank, each with its place (`FILE line N`)."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path} line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{place} is not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8.") from error
            if line.strip():
                yield place, line


def parse_record(line: str, place: str) -> dict[str, Any]:
    """The JSON object of a line of `read_lines`. Raises ValueError naming its place if it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place} is not valid JSON ({error}); write one JSON object a line.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place} must be a JSON object; got {type(record).__name__}.")
    return record


def write_text(path: Path | str, text: str) -> None:
    """Write a text as `write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path | str, content: bytes) -> None:
    """Write a file under a temporary name beside it, then rename it: the file is old or new, never half.

    A symbolic link stays, the file it names is written. A pipe or a device is written straight into.
    """
    place = Path(os.path.realpath(path))
    # of a standard stream the real path may be no path at all (`pipe:[123]`), and a link that names itself has none
    is_plain = stat.S_ISREG(os.stat(path).st_mode) and place.is_file() if os.path.exists(path) else not place.is_symlink()
    if not is_plain:
        with open(path, "wb") as file:
            file.write(content)
        return
    temporary = place.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def pin_settings(path: Path | str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run that can be resumed, as JSON, or compare them with those already there.

    Raises ValueError that names what differs, one level deep in nested settings.
    """
    path, given = Path(path), json.loads(json.dumps(settings))
    found = read_json(path)
    if found is None:
        write_text(path, json.dumps(given, indent=2) + "\n")
    elif found != given:
        given, found = _flatten(given), _flatten(found)
        different = sorted(name for name in given.keys() | found.keys() if given.get(name) != found.get(name))
        raise ValueError(
            f"{path.parent} holds a run with other settings ({', '.join(different)}); choose another folder or the same settings."
        )


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        flat |= {f"{name}.{inner}": found for inner, found in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _import_transformers() -> Any:
    """Import transformers without its advice to install PyTorch, which nothing here needs."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers
