"""Convert PyTorch checkpoints (safetensors) to our directories and back, by the tables.

In: Hugging Face / z-lab directories, or directories of ours, of a target and a drafter that belong together.
Out: one directory in the layout of `checkpoint`, or nothing at all and one error that lists every problem.
Source: the safetensors format; headers are checked before any weight is read, then one tensor at a time is read into the model.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from reanchor_jax import checkpoint, pairs
from reanchor_jax.config import DrafterConfig, TargetConfig, check_pair
from reanchor_jax.files import check_vacant, fresh_directory, read_json, sha256
from reanchor_jax.models.drafter import Models

from .plan import Move, key_of, plan, source_shape
from .tables import TABLES, Table, Transform


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
    dry_run: bool = False,
    overwrite: bool = False,
    show_progress: bool = True,
) -> Path | None:
    """Write `out` from a target and a drafter; return its path, or None after a dry run, which prints the mapping and writes nothing.

    target_dir: a Hugging Face directory. pair: instead of it, an embedded pair's name or a directory of ours; its drafter is kept
        unless drafter_dir is given.
    drafter_dir: a z-lab DFlash directory, or a directory of ours with a drafter; None means no drafter (or the pair's own).
    dtype: float32, bfloat16 or float16; None keeps the dtype of the checkpoint.
    overwrite: replace `out` if it is a directory of ours.
    Raises ConversionError listing every missing, unexpected, ill-shaped or unreadable tensor, ValueError for configs that are wrong or do
    not belong together, FileNotFoundError and FileExistsError for paths. Memory: the models and one tensor.
    """
    out, dtype = Path(out), None if dtype is None else checkpoint.as_dtype(dtype)
    if target_dir is not None and pair is None:
        source = Path(target_dir)
    elif pair is not None and target_dir is None:
        source = pairs.path(pair)
    else:
        raise ValueError("give either a target directory or a pair; got " + ("neither." if pair is None else "both."))
    if not dry_run:
        check_vacant(out, may_replace=checkpoint.is_directory_of_ours if overwrite else None)
    parts, files = _read_parts(source, drafter_dir, is_pair=pair is not None)

    moves, dtypes, problems = {}, set(), []
    for part in parts:
        if part.table is None:
            stored = {leaf.dtype.name for leaf in checkpoint.stored_leaves(part.directory / part.name).values()}
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

    planned = [move for found in moves.values() for move in found]
    # every file is read once for its checksum, every tensor once for the weights
    total = sum(file.stat().st_size for file in {move.file for move in planned}) + sum(move.num_bytes for move in planned)
    with tqdm(total=total, unit="B", unit_scale=True, desc="convert", disable=not show_progress) as progress:
        modules, origins = {}, {}
        for part in parts:
            modules[part.name], origins[part.name] = _read(part, moves.get(part.name, ()), dtype, progress)
    configs = {part.name: part.config for part in parts}
    return checkpoint.save(
        out,
        Models(target=modules["target"], drafter=modules.get("drafter")),
        target_config=configs["target"],
        drafter_config=configs.get("drafter"),
        files=files,
        provenance=origins,
        overwrite=overwrite,
    )


def export_huggingface(directory: Path | str, out: Path | str) -> Path:
    """Write a directory of ours as PyTorch checkpoints: `out/target/` for transformers and `out/drafter/` for dflash; return `out`.

    Inverse of `convert`: the same tables, transposes undone, dtype kept.
    Raises as `checkpoint.load`, and FileExistsError if `out` is taken.
    """
    directory, out = Path(directory), Path(out)
    found = checkpoint.read_contents(directory)
    modules: dict[str, tuple[nnx.Module, dict[str, Any], Table]] = {}
    if found.target_config is not None:
        target = checkpoint.load(directory).target
        modules["target"] = (target, found.target_config, TABLES[target.config.family])
    if found.drafter_config is not None:
        modules["drafter"] = (checkpoint.load_drafter(directory), found.drafter_config, TABLES["dflash"])
    with fresh_directory(out) as fresh:
        for name, (module, config, table) in modules.items():
            (fresh / name).mkdir()
            tensors = _export_tensors(module, table)
            dtype = next(iter(tensors.values())).dtype.name
            spelling = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
            (fresh / name / "config.json").write_text(json.dumps({**config, spelling: dtype}, indent=2) + "\n", encoding="utf-8")
            save_file(tensors, fresh / name / "model.safetensors", metadata={"format": "pt"})
        if "target" in modules:
            for name, path in found.files.items():
                (fresh / "target" / name).write_bytes(path.read_bytes())
    return out


def _read_parts(source: Path, drafter_dir: Path | str | None, *, is_pair: bool) -> tuple[list[_Part], dict[str, Path]]:
    """Read and check every config before any weight: the parts to write, and the files to copy beside them."""
    found = checkpoint.read_contents(source) if is_pair else _read_huggingface(source, "target")
    if found.target_config is None:
        raise FileNotFoundError(f"{source} holds no target; give the directory of a pair with one.")
    target_config = checkpoint.read_target_config(found, source)
    parts = [_part("target", source, found, target_config, is_ours=is_pair)]
    if drafter_dir is not None:
        drafter_source = Path(drafter_dir)
        is_ours = checkpoint.is_directory_of_ours(drafter_source)
        drafter_found = checkpoint.read_contents(drafter_source) if is_ours else _read_huggingface(drafter_source, "drafter")
    else:
        drafter_source, is_ours, drafter_found = source, is_pair, found
    if drafter_found.drafter_config is not None:
        drafter_config = checkpoint.read_drafter_config(drafter_found, drafter_source)
        check_pair(target_config, drafter_config)
        parts.append(_part("drafter", drafter_source, drafter_found, drafter_config, is_ours=is_ours))
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
    names = ("generation_config.json", *checkpoint.TOKENIZER_FILES)
    return checkpoint.Contents(
        target_config=config if name == "target" else None,
        drafter_config=config if name == "drafter" else None,
        generation_config=read_json(directory / "generation_config.json"),
        provenance={},
        files={file: directory / file for file in names if (directory / file).is_file()},
    )


def _part(name: str, directory: Path, found: checkpoint.Contents, config: TargetConfig | DrafterConfig, *, is_ours: bool) -> _Part:
    if isinstance(config, TargetConfig):
        table, module, dictionary = TABLES[config.family], checkpoint.build_target(config, np.float32), found.target_config
    else:
        table, module, dictionary = TABLES["dflash"], checkpoint.build_drafter(config, np.float32), found.drafter_config
    return _Part(
        name=name,
        directory=directory,
        config=dictionary or {},
        table=None if is_ours else table,
        module=module,
        origin=found.provenance.get(name) or {"source": directory.resolve().name},
    )


def _read(part: _Part, moves: Iterable[Move], dtype: np.dtype | None, progress: tqdm) -> tuple[nnx.Module, dict[str, Any]]:
    """Fill a part's module on the host, file by file; return it with its provenance."""
    if part.table is None:
        if part.name == "drafter":
            return checkpoint.load_drafter(part.directory, dtype=dtype), part.origin
        return checkpoint.load(part.directory, dtype=dtype).target, part.origin
    moves = list(moves)
    values: dict[str, np.ndarray] = {}
    checksums: dict[str, str] = {}
    problems: list[str] = []
    # repeats come last: the leaf they repeat must have been read
    for is_repeat in (False, True):
        for file in dict.fromkeys(move.file for move in moves if move.is_repeat == is_repeat):
            if file.name not in checksums:
                checksums[file.name] = sha256(file, progress.update)
            with safe_open(file, framework="np") as tensors:
                for move in moves:
                    if move.file != file or move.is_repeat != is_repeat:
                        continue
                    tensor = tensors.get_tensor(move.key)
                    progress.update(move.num_bytes)
                    value = np.ascontiguousarray(_transform(tensor, move.transform))
                    value = value if dtype is None else _cast(value, dtype, move.key, problems)
                    if not is_repeat:
                        values[move.leaf] = value
                    elif not np.array_equal(values[move.leaf], value):
                        problems.append(
                            f"repeat: {move.key} differs from the embedding although tie_word_embeddings is true; "
                            "set it to false in config.json if the head has weights of its own"
                        )
    _raise_if([f"{part.name}: {problem}" for problem in problems])
    dtype = next(iter(values.values())).dtype
    build = checkpoint.build_target if part.name == "target" else checkpoint.build_drafter
    module = build(part.module.config, dtype)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    return checkpoint.with_leaves(module, values), {**part.origin, "files": checksums}


def _export_tensors(module: nnx.Module, table: Table) -> dict[str, np.ndarray]:
    tensors = {}
    for leaf, value in checkpoint.leaves(module).items():
        key, transform = key_of(leaf, table)
        # safetensors writes the buffer as it lies in memory, so a transposed view must be copied
        tensors[key] = np.ascontiguousarray(_transform(np.asarray(value), transform))
    return tensors


def _transform(tensor: np.ndarray, transform: Transform) -> np.ndarray:
    return tensor.T if transform == "transpose" else tensor


def _cast(value: np.ndarray, dtype: np.dtype, key: str, problems: list[str]) -> np.ndarray:
    """Cast; a finite value beyond float16's range is a problem, not an infinity."""
    if value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if dtype == np.float16 and np.isinf(cast).any() and not np.isinf(value.astype(np.float32)).any():
        problems.append(f"dtype: {key} holds values beyond float16's range; choose bfloat16 or float32")
    return cast


def _print_mapping(parts: Iterable[_Part], moves: Mapping[str, Iterable[Move]], dtype: np.dtype | None) -> None:
    for part in parts:
        print(f"{part.name}: from {part.directory}")
        if part.table is None:
            print(f"  {len(checkpoint.leaves(part.module))} leaves copied as they are")
        for move in moves.get(part.name, ()):
            action = "must equal" if move.is_repeat else "->"
            shape = list(source_shape(move.shape, move.transform))
            print(f"  {move.key} {list(move.shape)} {move.dtype} {action} {move.leaf} {shape} {dtype or move.dtype}")


def _raise_if(problems: list[str]) -> None:
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConversionError(f"{count}, nothing was written:\n" + "\n".join(f"  {problem}" for problem in problems))
