"""Convert PyTorch checkpoints (safetensors) to our directories and back, by the tables.

In: Hugging Face / z-lab directories, or directories of ours, of a target and a drafter that belong together.
Out: one directory in the layout of `checkpoint`, or nothing at all and one error that lists every problem.
Source: the safetensors format. Headers are checked before any weight is read, then weights pass from the files into the directory a few
    rows at a time.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from reanchor_jax import checkpoint, huggingface, pairs
from reanchor_jax.config import DrafterConfig, TargetConfig, check_pair
from reanchor_jax.files import check_vacant, clear_leftovers, fresh_directory, read_json, sha256
from reanchor_jax.weights import Rows, num_bytes, stored_leaves

from .families import find_options
from .hub import find_directory
from .plan import Move, plan, shapes, share_index, share_shape, sources
from .tables import Table, drafter_table, target_table

_BLOCK_BYTES = 1 << 26  # of a tensor read at once to check it


class ConversionError(ValueError):
    """The checkpoint does not fit the model; the message lists every problem found."""


class _Part(NamedTuple):
    """One model to be written.

    name: target or drafter. directory: where it comes from. config: its Hugging Face config dict.
    table: None if the directory is ours. module: shapes only. origin: its provenance, if it has one already.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    table: Table | None
    module: nnx.Module
    origin: dict[str, Any]


def convert(
    target_dir: Path | str | None,
    drafter_dir: Path | str | None,
    out: Path | str,
    *,
    pair: Path | str | None = None,
    dtype: Any = None,
    options: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> Path | None:
    """Write `out` from a target and a drafter; return its path, or None after a dry run, which prints the mapping and writes nothing.

    target_dir: a Hugging Face directory, or a hub repository (`owner/name` or `owner/name@revision`).
    pair: instead of it, an embedded pair's name or a directory of ours; its drafter is kept unless drafter_dir is given.
    drafter_dir: a drafter's directory or hub repository, or a directory of ours with a drafter; None means no drafter (or the pair's own).
    dtype: float32, bfloat16 or float16; None keeps the dtype of the checkpoint.
    options: what the drafter's config does not say or says wrongly: `is_shifted`, `num_drafts`, `temperatures` (of its confidences).
    overwrite: replace `out` if it is a directory of ours.
    Raises ConversionError listing every missing, unexpected, ill-shaped or unreadable tensor, ValueError for configs that are wrong or do
    not belong together, FileNotFoundError and FileExistsError for paths, BlockingIOError if another process is writing `out`.
    Memory: some 600 MB, whatever the size of the models; what comes from a directory of ours is held whole, though.
    A process killed at any moment leaves `out` as it was or complete, or, between the two renames of a replacement, whole beside it. The
    same command again puts it back or removes what the dead one left, and starts over; nothing is resumed.
    """
    out, dtype = Path(out), None if dtype is None else checkpoint.as_dtype(dtype)
    if not dry_run:
        clear_leftovers(out)  # first of all: a run killed while it replaced the pair it read from has the pair put back
    if target_dir is not None and pair is None:
        source = Path(target_dir)
    elif pair is not None and target_dir is None:
        source, drafter_path = pairs.find(pair)
        drafter_dir = drafter_path if drafter_dir is None and drafter_path != source else drafter_dir
    else:
        raise ValueError("give either a target directory or a pair; got " + ("neither." if pair is None else "both."))
    if not dry_run:
        check_vacant(out, foreign_entry=checkpoint.foreign_entry if overwrite else None)
    parts, files = _read_parts(source, drafter_dir, is_pair=pair is not None, options=options or {})

    moves, dtypes, problems = {}, set(), []
    for part in parts:
        if part.table is None:
            stored = {leaf.dtype.name for leaf in stored_leaves(part.directory / part.name).values()} - {"int32"}
        else:
            moves[part.name], found = plan(part.directory, checkpoint.leaves(part.module), part.table)
            stored = {move.dtype for move in moves[part.name] if move.dtype in checkpoint.DTYPES}
            problems += [f"{part.name}: {problem}" for problem in found]
        dtypes |= stored
    if len(dtypes) > 1 and dtype is None:
        problems.append(f"dtype: the weights are of several dtypes ({', '.join(sorted(dtypes))}); pass dtype to cast them to one")
    _raise_if(problems)
    if dry_run:
        _print_mapping(parts, moves, dtype)
        return None

    with tqdm(unit="B", unit_scale=True, desc="convert", disable=not show_progress) as progress:
        weights, origins = {}, {part.name: part.origin for part in parts}
        for part in parts:
            if part.table is not None:
                fills = _by_leaf(moves[part.name])
                weights[part.name] = {leaf: _leaf_rows(shares, dtype, progress.update) for leaf, shares in fills.items()}
            else:
                load = checkpoint.load_target if part.name == "target" else checkpoint.load_drafter
                weights[part.name] = checkpoint.leaves(load(part.directory, dtype=dtype))
        vocab_size = parts[0].module.config.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
        planned = [move for found in moves.values() for move in found]
        # each file is read once for its checksum, each tensor once to be checked where it must be and once to be written
        total = sum(file.stat().st_size for file in {move.file for move in planned})
        total += sum(move.num_bytes * (_is_checked(move, dtype) + (not move.is_repeat)) for move in planned)
        progress.reset(total=total + sum(num_bytes(leaf) for found in weights.values() for leaf in found.values()))
        for name, found in moves.items():
            files_read = dict.fromkeys(move.file for move in found)
            origins[name] = {**origins[name], "files": {file.name: sha256(file, progress.update) for file in files_read}}
            problems += [f"{name}: {problem}" for problem in _check_values(found, dtype, vocab_size, progress.update)]
        _raise_if(problems)
        return checkpoint.write(
            out,
            weights,
            {part.name: part.config for part in parts},
            files=files,
            provenance=origins,
            overwrite=overwrite,
            progress=progress,
        )


def export_huggingface(directory: Path | str, out: Path | str, *, parts: Sequence[str] = ("target", "drafter")) -> Path:
    """Write a directory of ours as PyTorch checkpoints: `out/target/` for transformers and `out/drafter/` for dflash; return `out`.

    Inverse of `convert`: the same tables, transposes undone, dtype kept. parts: those that are written, of what the directory holds.
    Raises as `checkpoint.load`, and FileExistsError if `out` is taken.
    """
    directory, out = Path(directory), Path(out)
    found = checkpoint.read_contents(directory)
    modules: dict[str, tuple[nnx.Module, dict[str, Any], Table]] = {}
    if found.target_config is not None and "target" in parts:
        target = checkpoint.load_target(directory)
        modules["target"] = (target, found.target_config, target_table(target.config))
    if found.drafter_config is not None and "drafter" in parts:
        drafter = checkpoint.load_drafter(directory)
        modules["drafter"] = (drafter, _published_config(found.drafter_config), drafter_table(drafter.config))
    with fresh_directory(out) as fresh:
        for name, (module, config, table) in modules.items():
            (fresh / name).mkdir()
            tensors = export_tensors(module, table)
            dtype = next(iter(tensors.values())).dtype.name
            spelling = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
            (fresh / name / "config.json").write_text(json.dumps({**config, spelling: dtype}, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, fresh / name / "model.safetensors", metadata={"format": "pt"})
        if "target" in modules:
            for name, path in found.files.items():
                (fresh / "target" / name).write_bytes(path.read_bytes())
    return out


def _read_parts(
    source: Path, drafter_dir: Path | str | None, *, is_pair: bool, options: Mapping[str, Any]
) -> tuple[list[_Part], dict[str, Path]]:
    """Read and check every config before any weight: the parts to write, and the files to copy beside them."""
    source, source_name = (source, source.resolve().name) if is_pair else find_directory(source)
    found = checkpoint.read_contents(source) if is_pair else _read_huggingface(source, "target")
    if found.target_config is None:
        raise FileNotFoundError(f"{source} holds no target; give the directory of a pair with one.")
    target_config = checkpoint.read_target_config(found, source)
    parts = [_part("target", source, source_name, found, target_config, is_ours=is_pair)]
    if drafter_dir is not None:
        drafter_source, drafter_name = find_directory(drafter_dir)
        is_ours = checkpoint.is_directory_of_ours(drafter_source)
        drafter_found = checkpoint.read_contents(drafter_source) if is_ours else _read_huggingface(drafter_source, "drafter")
        if not is_ours and drafter_found.drafter_config is not None:
            chosen = find_options(drafter_found.drafter_config, shapes(drafter_source), options)
            drafter_found = drafter_found._replace(drafter_config={**drafter_found.drafter_config, huggingface.OPTIONS: chosen})
    else:
        drafter_source, drafter_name, is_ours, drafter_found = source, source_name, is_pair, found
    if options and (is_ours or drafter_dir is None):
        raise ValueError(f"{', '.join(options)} are for a drafter that is converted from PyTorch; give its directory as drafter.")
    if drafter_found.drafter_config is not None:
        drafter_config = checkpoint.read_drafter_config(drafter_found, drafter_source)
        check_pair(target_config, drafter_config)
        parts.append(_part("drafter", drafter_source, drafter_name, drafter_found, drafter_config, is_ours=is_ours))
    elif drafter_dir is not None:
        raise FileNotFoundError(f"{drafter_source} holds no drafter; give a directory with one.")
    return parts, found.files


def _read_huggingface(directory: Path, name: str) -> checkpoint.Contents:
    if not directory.is_dir():
        raise FileNotFoundError(f"{name} directory {directory} does not exist; give a downloaded checkpoint with config.json.")
    config = read_json(directory / "config.json")
    if config is None:
        hint = " It is a directory of ours: pass it as pair." if checkpoint.is_directory_of_ours(directory) else ""
        raise FileNotFoundError(f"{name} directory {directory} has no config.json; give a downloaded checkpoint.{hint}")
    if name == "drafter" and (directory / "mask_embedding.pt").exists():
        raise ValueError(f"{directory} has its own mask embedding (mask_embedding.pt), which is not supported yet; use another drafter.")
    names = ("generation_config.json", *checkpoint.TOKENIZER_FILES)
    return checkpoint.Contents(
        target_config=config if name == "target" else None,
        drafter_config=config if name == "drafter" else None,
        generation_config=read_json(directory / "generation_config.json"),
        provenance={},
        files={file: directory / file for file in names if (directory / file).is_file()},
    )


def _part(
    name: str, directory: Path, source: str, found: checkpoint.Contents, config: TargetConfig | DrafterConfig, *, is_ours: bool
) -> _Part:
    if isinstance(config, TargetConfig):
        module, dictionary = checkpoint.build_target(config, np.float32), found.target_config
        table = None if is_ours else target_table(config)
    else:
        module, dictionary = checkpoint.build_drafter(config, np.float32), found.drafter_config
        table = None if is_ours else drafter_table(config)
    return _Part(
        name=name,
        directory=directory,
        config=dictionary or {},
        table=table,
        module=module,
        origin=found.provenance.get(name) or {"source": source},
    )


def _by_leaf(moves: Iterable[Move]) -> dict[str, list[Move]]:
    found: dict[str, list[Move]] = {}
    for move in moves:
        if not move.is_repeat:
            found.setdefault(move.leaf, []).append(move)
    return found


def _leaf_rows(moves: list[Move], dtype: np.dtype | None, progress: Callable[[int], Any]) -> Rows:
    """The leaf that tensors fill, each its share, as it is read from the file; progress is told the bytes read."""
    shares = [_rows(move, dtype, progress) for move in moves]
    shape, to = moves[0].leaf_shape, shares[0].dtype

    def read(start: int, stop: int) -> np.ndarray:
        block = np.empty((stop - start, *shape[1:]), to)
        for move, rows in zip(moves, shares, strict=True):
            block[share_index(move.share)] = rows.read(start, stop)
        return block

    return shares[0] if moves[0].share is None else Rows(shape=shape, dtype=to, read=read)


def _rows(move: Move, dtype: np.dtype | None, progress: Callable[[int], Any]) -> Rows:
    """The entries of a leaf that a tensor fills, as they are read from the file; progress is told the bytes read."""
    to = np.dtype("int32" if move.transform == "offsets" else move.dtype if dtype is None else dtype)
    shape = share_shape(move.leaf_shape, move.share)

    def read(start: int, stop: int) -> np.ndarray:
        # opened anew for every block: pages of a file stay mapped as long as it is open
        with safe_open(move.file, framework="np") as tensors:
            view = tensors.get_slice(move.key)
            block = view[:, start:stop].T.reshape(-1, *shape[1:]) if move.transform == "transpose" else view[start:stop]
        progress(block.nbytes)
        if move.transform == "offsets":
            # what int32 cannot hold must stay wrong, not wrap around into a token
            block = np.clip(block + np.arange(start, stop, dtype=block.dtype), -1, 2**31 - 1)
        return block.astype(to, copy=False)

    return Rows(shape=shape, dtype=to, read=read)


def _is_checked(move: Move, dtype: np.dtype | None) -> bool:
    """Whether a tensor's values may forbid the conversion."""
    return move.is_repeat or move.transform == "offsets" or (dtype == np.float16 and move.dtype != "float16")


def _check_values(moves: list[Move], dtype: np.dtype | None, vocab_size: int, progress: Callable[[int], Any]) -> list[str]:
    """Tell which tensors do not repeat what they must, hold finite values that float16 would make infinite, or map to no token."""
    problems = []
    fills = {move.leaf: move for move in moves if not move.is_repeat}
    for move in moves:
        if move.is_repeat:
            pairs_of_blocks = zip(_blocks(fills[move.leaf], dtype), _blocks(move, dtype, progress), strict=True)
            if not all(np.array_equal(block, repeated) for block, repeated in pairs_of_blocks):
                problems.append(
                    f"repeat: {move.key} differs from the embedding although tie_word_embeddings is true; "
                    "set it to false in config.json if the head has weights of its own"
                )
        elif move.transform == "offsets":
            ids = np.concatenate(list(_blocks(move, None, progress)))
            if not ((np.diff(ids) > 0).all() and (len(ids) == 0 or (ids[0] >= 0 and ids[-1] < vocab_size))):
                problems.append(f"{move.key}: index + value must rise strictly within 0..{vocab_size - 1}, the target's vocabulary")
        elif _is_checked(move, dtype) and any(_overflows(block) for block in _blocks(move, None, progress)):
            problems.append(f"dtype: {move.key} holds values beyond float16's range; choose bfloat16 or float32")
    return problems


def _blocks(move: Move, dtype: np.dtype | None, progress: Callable[[int], Any] = lambda num_bytes: None) -> Iterator[np.ndarray]:
    rows = _rows(move, dtype, progress)
    step = max(1, _BLOCK_BYTES * rows.shape[0] // max(1, move.num_bytes))
    for start in range(0, rows.shape[0], step):
        yield rows.read(start, min(start + step, rows.shape[0]))


def _overflows(block: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool((np.isinf(block.astype(np.float16)) & ~np.isinf(block)).any())


def _published_config(config: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config dict without our section; what only that section said is said in the fields that packagers use."""
    published = {name: value for name, value in config.items() if name != huggingface.OPTIONS}
    options, told = config.get(huggingface.OPTIONS, {}), huggingface.read_options(published)
    if options.get("is_shifted", told["is_shifted"]) != told["is_shifted"]:
        published["sample_from_anchor"] = options["is_shifted"]
    if options.get("num_drafts") not in (None, told["num_drafts"]):
        published["num_drafts"] = options["num_drafts"]
    temperatures = (options.get("confidence") or {}).get("temperatures")
    if temperatures and temperatures != (told["confidence"] or {}).get("temperatures"):
        published["confidence_temperatures"] = temperatures
    return published


def export_tensors(module: nnx.Module, table: Table) -> dict[str, np.ndarray]:
    """A module's weights by key and in the layout of its PyTorch checkpoint: the table read backwards."""
    tensors = {}
    for leaf, value in checkpoint.leaves(module).items():
        for key, rule in sources(leaf, table):
            if rule.transform == "offsets":
                tensors[key] = np.asarray(value, np.int64) - np.arange(value.size)
                continue
            share = np.asarray(value)[share_index(rule.share)]
            # safetensors writes the buffer as it lies in memory, so a transposed view must be copied
            tensors[key] = np.ascontiguousarray(share.reshape(len(share), -1).T if rule.transform == "transpose" else share)
    return tensors


def _print_mapping(parts: Iterable[_Part], moves: Mapping[str, Iterable[Move]], dtype: np.dtype | None) -> None:
    for part in parts:
        print(f"{part.name}: from {part.directory}")
        if part.table is None:
            print(f"  {len(checkpoint.leaves(part.module))} leaves copied as they are")
        for move in moves.get(part.name, ()):
            action = "must equal" if move.is_repeat else "->"
            index = [f"{one.start or ''}:{one.stop or ''}" if one != slice(None) else ":" for one in share_index(move.share)]
            place = move.leaf + (f"[{', '.join(index)}]" if index else "")
            shape = list(share_shape(move.leaf_shape, move.share))
            print(f"  {move.key} {list(move.shape)} {move.dtype} {action} {place} {shape} {dtype or move.dtype}")


def _raise_if(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConversionError(f"{count}, nothing was written:\n" + "\n".join(f"  {problem}" for problem in problems))
