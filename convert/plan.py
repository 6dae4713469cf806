"""Plan a conversion from safetensors headers alone: which tensor fills which leaf, and everything that does not fit.

In: a Hugging Face directory, the leaves of the model that its config describes, the table of its family.
Out: moves, one a tensor, and problems as text.
Source: the safetensors format and `model.safetensors.index.json`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy; safetensors fails on it otherwise
import numpy as np
from safetensors import safe_open

from reanchor_jax.files import read_json

from .tables import Rule, Table, Transform, bare

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = ("I64", "I32")


class Move(NamedTuple):
    """One tensor to read.

    key: its name in the checkpoint. file: where it is.
    shape: as stored. dtype: its numpy name. num_bytes: as stored.
    leaf: path of the leaf it fills, or that it must equal if is_repeat.
    transform: what turns it into the leaf.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    leaf: str
    transform: Transform
    is_repeat: bool


def plan(directory: Path, wanted: Mapping[str, Any], table: Table) -> tuple[list[Move], list[str]]:
    """Match every key of every header with a leaf; return the moves, repeats last, and everything that does not fit.

    wanted: shapes of the model's leaves by path.
    """
    rules = [(_pattern(rule.source), rule) for rule in table.rules]
    files, problems = _weight_files(directory)
    can_list_missing = not problems
    moves: dict[str, Move] = {}
    repeats: list[Move] = []
    key_files: dict[str, str] = {}
    for file in files:
        try:
            header = list(_header(file))
        except Exception as error:  # safetensors raises its own class, OSError or JSON errors
            problems.append(f"file: {file.name} is truncated or corrupt ({error}); download it again")
            can_list_missing = False
            continue
        for key, shape, dtype, num_bytes in header:
            if key in key_files:
                problems.append(f"duplicate: {key} is in {key_files[key]} and in {file.name}")
                continue
            key_files[key] = file.name
            name = bare(key, table)
            if any(re.fullmatch(pattern, name) for pattern in table.ignored):
                continue
            leaf, transform, is_repeat = _match(name, rules, table, wanted)
            if leaf is None:
                problems.append(f"unexpected: {key} {list(shape)} has no place in the model that config.json describes")
                continue
            if leaf in moves and not is_repeat:
                problems.append(f"duplicate: {key} and {moves[leaf].key} are the same tensor")
                continue
            needed = tuple(wanted[leaf].shape)
            if source_shape(shape, transform) != needed:
                problems.append(f"shape: {key} is {list(shape)}, config.json asks for {list(source_shape(needed, transform))}")
            if transform == "offsets" and dtype not in _INTEGERS:
                problems.append(f"dtype: {key} is {dtype}; a token map must be of integers ({', '.join(_INTEGERS)})")
            elif transform != "offsets" and dtype not in _SAFETENSORS_DTYPES:
                problems.append(f"dtype: {key} is {dtype}; only {', '.join(_SAFETENSORS_DTYPES)} are converted (no quantised weights)")
            move = Move(
                key=key,
                file=file,
                shape=shape,
                dtype=_SAFETENSORS_DTYPES.get(dtype, dtype),
                num_bytes=num_bytes,
                leaf=leaf,
                transform=transform,
                is_repeat=is_repeat,
            )
            if is_repeat:
                repeats.append(move)
            else:
                moves[leaf] = move
    if can_list_missing:
        problems += [_missing(leaf, table) for leaf in wanted if leaf not in moves]
    return [*moves.values(), *repeats], problems


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by key, from the headers of those files that can be read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(directory)[0]:
        try:
            found |= {key: shape for key, shape, _, _ in _header(file)}
        except Exception:  # `plan` names what cannot be read
            continue
    return found


def key_of(leaf: str, table: Table) -> tuple[str, Transform]:
    """Key and transform of a leaf: the table read backwards."""
    for rule in table.rules:
        match = _pattern(rule.destination).fullmatch(leaf)
        if match:
            return rule.source.format(prefix=table.prefix, **match.groupdict()), rule.transform
    raise KeyError(f"no rule fills {leaf}; add one to convert/tables.py.")


def source_shape(shape: tuple[int, ...], transform: Transform) -> tuple[int, ...]:
    """Shape of a tensor in the checkpoint from its leaf's, or the other way round."""
    return shape[::-1] if transform == "transpose" else shape


def _weight_files(directory: Path) -> tuple[list[Path], list[str]]:
    """Files that hold the weights, and what is wrong with the list itself."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single], []
    if not index.is_file():
        hint = " (only safetensors is read: load the model in PyTorch and save_pretrained it)" if list(directory.glob("*.bin")) else ""
        return [], [f"file: neither model.safetensors nor model.safetensors.index.json in {directory.name}{hint}"]
    try:
        weight_map = (read_json(index) or {}).get("weight_map")
    except ValueError as error:
        return [], [f"file: {error}"]
    if not isinstance(weight_map, dict) or not weight_map:
        return [], [f"file: {index.name} has no weight_map; download it again"]
    names = sorted(set(map(str, weight_map.values())))
    problems = [f"file: {name} of {index.name} is not a file name" for name in names if Path(name).name != name]
    problems += [f"file: {name} is listed in {index.name} but missing; download it" for name in names if not (directory / name).is_file()]
    return [directory / name for name in names if Path(name).name == name and (directory / name).is_file()], problems


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Key, shape, safetensors dtype and size in bytes of every tensor; opening checks the file's length against its header."""
    with safe_open(file, framework="np") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dict, has no iterator
            view = tensors.get_slice(key)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            itemsize = np.dtype(_SAFETENSORS_DTYPES[dtype]).itemsize if dtype in _SAFETENSORS_DTYPES else 1
            yield key, shape, dtype, int(np.prod(shape)) * itemsize


def _match(
    name: str, rules: list[tuple[re.Pattern[str], Rule]], table: Table, wanted: Mapping[str, Any]
) -> tuple[str | None, Transform, bool]:
    """Leaf and transform of a bare key, and whether it only repeats that leaf; None if the model has no place for it."""
    for pattern, rule in rules:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        leaf = rule.destination.format(**match.groupdict())
        if leaf in wanted:
            return leaf, rule.transform, False
        if rule.source in table.repeats:
            return table.repeats[rule.source], "none", True
    return None, "none", False


def _missing(leaf: str, table: Table) -> str:
    key = key_of(leaf, table)[0]
    hint = ""
    if key in table.repeats:
        hint = " (config.json says tie_word_embeddings is false; set it to true if the head is the embedding)"
    return f"missing: {key} for {leaf}{hint}"


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{prefix\}", "").replace(r"\{layer\}", "(?P<layer>0|[1-9][0-9]*)"))
