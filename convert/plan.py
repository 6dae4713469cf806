"""Plan a conversion from safetensors headers alone: which tensor fills which leaf, and everything that does not fit.

In: a Hugging Face directory, the leaves of the model that its config describes, the table of its family.
Out: moves, one a tensor, and problems as text.
Source: the safetensors format and `model.safetensors.index.json`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy; safetensors fails on it otherwise
import numpy as np
from safetensors import safe_open

from reanchor_jax.files import read_json

from .tables import Rule, Share, Table, Transform, bare

_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = ("I64", "I32")


class Move(NamedTuple):
    """One tensor to read.

    key: its name in the checkpoint. file: where it is.
    shape: as stored. dtype: its numpy name. num_bytes: as stored.
    leaf: path of the leaf it fills, or that it must equal if is_repeat. leaf_shape: of the whole leaf.
    share: entries of the leaf that it fills; None if all of them. transform: what turns it into those.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    leaf: str
    leaf_shape: tuple[int, ...]
    share: Share | None
    transform: Transform
    is_repeat: bool


def plan(directory: Path, wanted: Mapping[str, Any], table: Table) -> tuple[list[Move], list[str]]:
    """Match every key of every header with a leaf; return the moves, repeats last, and everything that does not fit.

    wanted: shapes of the model's leaves by path.
    """
    rules = [(_pattern(rule.source), rule) for rule in table.rules]
    files, problems = _weight_files(directory)
    can_list_missing = not problems
    moves: dict[tuple[str, Share | None], Move] = {}
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
            leaf, transform, share, is_repeat = _match(name, rules, table, wanted)
            if leaf is None:
                problems.append(f"unexpected: {key} {list(shape)} has no place in the model that config.json describes")
                continue
            if (leaf, share) in moves and not is_repeat:
                problems.append(f"duplicate: {key} and {moves[leaf, share].key} are the same tensor")
                continue
            needed = source_shape(share_shape(wanted[leaf].shape, share), transform)
            if shape != needed:
                problems.append(f"shape: {key} is {list(shape)}, config.json asks for {list(needed)}")
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
                leaf_shape=tuple(wanted[leaf].shape),
                share=share,
                transform=transform,
                is_repeat=is_repeat,
            )
            if is_repeat:
                repeats.append(move)
            else:
                moves[leaf, share] = move
    if can_list_missing:
        problems += [_missing(key, leaf, table) for leaf in wanted for key, rule in sources(leaf, table) if (leaf, rule.share) not in moves]
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


def sources(leaf: str, table: Table) -> list[tuple[str, Rule]]:
    """Keys of the tensors that fill a leaf, and their rules: the table read backwards."""
    found = [(rule, match) for rule in table.rules if (match := _pattern(rule.destination).fullmatch(leaf))]
    if not found:
        raise KeyError(f"no rule fills {leaf}; add one to convert/tables.py.")
    return [(rule.source.format(prefix=table.prefix, **match.groupdict()), rule) for rule, match in found]


def share_index(share: Share | None) -> tuple[slice, ...]:
    """Index of the entries of a leaf that a tensor fills."""
    return () if share is None else (*[slice(None)] * share.axis, slice(share.start, share.stop))


def share_shape(shape: tuple[int, ...], share: Share | None) -> tuple[int, ...]:
    """Shape of the entries of a leaf of this shape that a tensor fills."""
    if share is None:
        return tuple(shape)
    return (*shape[: share.axis], len(range(shape[share.axis])[share.start : share.stop]), *shape[share.axis + 1 :])


def source_shape(shape: tuple[int, ...], transform: Transform) -> tuple[int, ...]:
    """Shape of a tensor in the checkpoint from that of the entries it fills."""
    return (math.prod(shape[1:]), shape[0]) if transform == "transpose" else tuple(shape)


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
) -> tuple[str | None, Transform, Share | None, bool]:
    """Leaf, transform and share of a bare key, and whether it only repeats that leaf; None if the model has no place for it."""
    for pattern, rule in rules:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        leaf = rule.destination.format(**match.groupdict())
        if leaf in wanted:
            return leaf, rule.transform, rule.share, False
        if rule.source in table.repeats:
            return table.repeats[rule.source], "none", None, True
    return None, "none", None, False


def _missing(key: str, leaf: str, table: Table) -> str:
    hint = ""
    if key in table.repeats:
        hint = " (config.json says tie_word_embeddings is false; set it to true if the head is the embedding)"
    return f"missing: {key} for {leaf}{hint}"


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{prefix\}", "").replace(r"\{layer\}", "(?P<layer>0|[1-9][0-9]*)"))
