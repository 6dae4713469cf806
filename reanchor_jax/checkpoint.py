"""Save and load Models as self-contained directories: weights, configs, tokenizer, provenance.

In: a directory: `target/` and `drafter/` (Orbax), `target_config.json` and `drafter_config.json` (Hugging Face config dicts),
    `generation_config.json`, tokenizer files, `provenance.json`. Either model may be absent.
Out: Models; or such a directory, written under a temporary name and renamed when complete.
Source: `weights` says how a folder of weights looks, `files` how a directory appears at once.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from reanchor_jax import huggingface
from reanchor_jax.config import DrafterConfig, TargetConfig, check_pair
from reanchor_jax.files import PROVENANCE, fresh_directory, read_json, read_provenance, record_files
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.weights import check_whole, num_bytes, restore_weights, stored_leaves, write_weights

# of the directories written here; one more when an older version could not read them
FORMAT = 2  # since 2, maps of the same input are one leaf

DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

_TARGET_CONFIG, _DRAFTER_CONFIG = "target_config.json", "drafter_config.json"
_PROJECT = "reanchor-jax"  # what the provenance of a directory written here says

M = TypeVar("M", bound=nnx.Module)
# Sharding of every leaf, or what tells it from a leaf's path (`target/layers/0/mlp/down/kernel`), shape and dtype.
Shardings = jax.sharding.Sharding | Callable[[str, jax.ShapeDtypeStruct], jax.sharding.Sharding] | None


class Contents(NamedTuple):
    """What a directory holds beside weights.

    target_config, drafter_config: Hugging Face config dicts; None where the model is absent.
    generation_config: the dict of `generation_config.json`, or None.
    provenance: the dict of `provenance.json`, empty if there is none.
    files: tokenizer files and `generation_config.json`, by name.
    """

    target_config: dict[str, Any] | None
    drafter_config: dict[str, Any] | None
    generation_config: dict[str, Any] | None
    provenance: dict[str, Any]
    files: dict[str, Path]


def load(path: Path | str, *, dtype: Any = None, sharding: Shardings = None) -> Models:
    """Read target and, where the directory has one, drafter.

    dtype: float32, bfloat16 or float16, cast while reading; None keeps what is stored.
    sharding: where the leaves lie: one for all of them (`NamedSharding(mesh, PartitionSpec())` repeats them on a mesh), or a function of
        a leaf's path, which begins with `target/` or `drafter/`, and its shape and dtype. None: JAX's default device.
    Memory: the models, and on the host what is being read: a gigabyte or the largest leaf.
    Raises FileNotFoundError if the directory or its target is missing, ValueError for weights that do not fit the config or cannot be read,
    for a sharding that does not fit a leaf, and for a directory of a newer version.
    """
    path, dtype = Path(path), None if dtype is None else as_dtype(dtype)
    found = read_contents(path)
    target_config = _existing_target_config(found, path)
    drafter_config = None if found.drafter_config is None else read_drafter_config(found, path)
    if drafter_config is not None:
        check_pair(target_config, drafter_config)
    drafter = None
    target = _restore(path / "target", partial(build_target, target_config), dtype, sharding)
    if drafter_config is not None:
        drafter = _restore(path / "drafter", partial(build_drafter, drafter_config), dtype, sharding)
    return Models(target=target, drafter=drafter)


def load_target(path: Path | str, *, dtype: Any = None, sharding: Shardings = None) -> Target:
    """Read the target of a directory and leave its drafter, if it has one, unread; arguments and errors as in `load`."""
    path, dtype = Path(path), None if dtype is None else as_dtype(dtype)
    config = _existing_target_config(read_contents(path), path)
    return _restore(path / "target", partial(build_target, config), dtype, sharding)


def load_drafter(path: Path | str, *, dtype: Any = None, sharding: Shardings = None) -> Drafter:
    """Read the drafter of a directory, with or without a target beside it; arguments and errors as in `load`."""
    path, dtype = Path(path), None if dtype is None else as_dtype(dtype)
    found = read_contents(path)
    if found.drafter_config is None:
        raise FileNotFoundError(f"{path} holds no drafter ({_DRAFTER_CONFIG} is missing); train or convert one first.")
    return _restore(path / "drafter", partial(build_drafter, read_drafter_config(found, path)), dtype, sharding)


def save(
    path: Path | str,
    models: Models,
    *,
    target_config: Mapping[str, Any],
    drafter_config: Mapping[str, Any] | None = None,
    files: Mapping[str, Path | bytes] | None = None,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory that `load` reads, and return its path.

    target_config, drafter_config: Hugging Face config dicts the models were built from.
    files: tokenizer files and generation_config.json, by name. provenance: where the weights come from; version, date and dtypes are added.
    overwrite: replace a directory written by this function; anything else that is not an empty directory is refused (`foreign_entry`).
    Raises ValueError if a config dict does not describe its model, FileExistsError if the path is taken.
    """
    generation = (files or {}).get("generation_config.json")
    if generation is not None:
        generation = json.loads(generation if isinstance(generation, bytes) else Path(generation).read_bytes())
    _check_describes("target_config", huggingface.read_target(target_config, generation), models.target.config)
    weights = {"target": leaves(models.target)}
    configs = {"target": target_config}
    if (models.drafter is None) != (drafter_config is None):
        raise ValueError("models.drafter and drafter_config go together: give both or neither.")
    if models.drafter is not None and drafter_config is not None:
        _check_describes("drafter_config", huggingface.read_drafter(drafter_config), models.drafter.config)
        weights["drafter"] = leaves(models.drafter)
        configs["drafter"] = drafter_config
    return write(path, weights, configs, files=files or {}, provenance=provenance or {}, overwrite=overwrite)


def save_drafter(
    path: Path | str,
    drafter: Drafter,
    *,
    drafter_config: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory with a drafter only, as training makes it; arguments and errors as in `save`."""
    _check_describes("drafter_config", huggingface.read_drafter(drafter_config), drafter.config)
    weights, configs = {"drafter": leaves(drafter)}, {"drafter": drafter_config}
    return write(path, weights, configs, files={}, provenance=provenance or {}, overwrite=overwrite)


def write(
    path: Path | str,
    weights: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Mapping[str, Any]],
    *,
    files: Mapping[str, Path | bytes],
    provenance: Mapping[str, Any],
    overwrite: bool,
    progress: tqdm | None = None,
) -> Path:
    """Write a directory from leaves instead of models, so that `weights.Rows` are read only when they are written; return its path.

    weights: leaves by path, of `target` and `drafter`. configs: their Hugging Face config dicts, which must describe those leaves.
    progress: a bar whose total counts every leaf's bytes once; reading the files back to record them moves it, and sets its total right.
    Other arguments and errors as in `save`. A process killed here leaves a temporary directory; the next one of the same path removes it
    and starts over.
    """
    for name in files:
        if name != "generation_config.json" and name not in TOKENIZER_FILES:
            raise ValueError(f"files holds {name!r}; known are generation_config.json, {', '.join(TOKENIZER_FILES)}.")
    about = {
        "project": _PROJECT,
        "version": importlib.metadata.version("reanchor-jax"),
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": {name: found["norm/scale"].dtype.name for name, found in weights.items()},
    }
    path = Path(path)
    with fresh_directory(path, foreign_entry=foreign_entry if overwrite else None) as fresh:
        for name, content in files.items():
            (fresh / name).write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
        for name, found in weights.items():
            write_weights(fresh / name, found)
        if progress is not None:
            written = sum(file.stat().st_size for name in weights for file in (fresh / name).rglob("*") if file.is_file())
            progress.total += written - sum(num_bytes(leaf) for found in weights.values() for leaf in found.values())
        on_block = progress.update if progress is not None else lambda num_bytes: None
        recorded = {name: record_files(fresh / name, on_block) for name in weights}
        jsons = {f"{name}_config.json": config for name, config in configs.items()}
        for name, value in {**jsons, PROVENANCE: {**about, **provenance, "weights": recorded}}.items():
            (fresh / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return path


def read_contents(path: Path) -> Contents:
    """Read everything but the weights.

    Raises FileNotFoundError if the path is no directory of ours, ValueError for broken JSON and for a directory of another format.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give the directory that convert or train wrote.")
    if not is_directory_of_ours(path):
        hint = "it looks like a Hugging Face checkpoint: convert it first (reanchor-jax convert)" if (path / "config.json").exists() else ""
        raise FileNotFoundError(
            f"{path} holds neither {_TARGET_CONFIG} nor {_DRAFTER_CONFIG}; {hint or 'give the directory that convert or train wrote'}."
        )
    provenance = read_provenance(path)
    # one without a provenance was written by other hands, and its leaves will show; the first with one had no number yet
    number = provenance.get("format", 1 if provenance else FORMAT)
    if number != FORMAT:
        version = importlib.metadata.version("reanchor-jax")
        is_older = isinstance(number, int) and number < FORMAT
        advice = "" if is_older else "install a newer reanchor-jax, or "
        raise ValueError(
            f"{path} has format {number!r}, reanchor-jax {version} reads format {FORMAT}; {advice}convert or train it again with this one."
        )
    return Contents(
        target_config=read_json(path / _TARGET_CONFIG),
        drafter_config=read_json(path / _DRAFTER_CONFIG),
        generation_config=read_json(path / "generation_config.json"),
        provenance=provenance,
        files={name: path / name for name in ("generation_config.json", *TOKENIZER_FILES) if (path / name).is_file()},
    )


def read_target_config(found: Contents, path: Path) -> TargetConfig:
    """Build the TargetConfig of a directory's contents. Raises ValueError naming the path for a config that does not hold."""
    try:
        return huggingface.read_target(found.target_config or {}, found.generation_config)
    except ValueError as error:
        raise ValueError(f"the target config of {path}: {error}") from error


def read_drafter_config(found: Contents, path: Path) -> DrafterConfig:
    """Build the DrafterConfig of a directory's contents. Raises ValueError naming the path for a config that does not hold."""
    try:
        return huggingface.read_drafter(found.drafter_config or {})
    except ValueError as error:
        raise ValueError(f"the drafter config of {path}: {error}") from error


def is_directory_of_ours(path: Path) -> bool:
    """Whether a directory is to be read as one that `save` or `save_drafter` wrote."""
    return (path / _TARGET_CONFIG).is_file() or (path / _DRAFTER_CONFIG).is_file()


def foreign_entry(path: Path) -> str | None:
    """Tell what in a directory `save` did not write, so that it must not be replaced; None if all of it may go.

    Raises ValueError if its provenance is damaged.
    """
    provenance = read_provenance(path)
    if provenance.get("project") != _PROJECT:
        return f"its {PROVENANCE} does not say so"
    files = {_TARGET_CONFIG, _DRAFTER_CONFIG, PROVENANCE, "generation_config.json", *TOKENIZER_FILES}
    for entry in sorted(path.iterdir()):
        is_known = entry.is_dir() if entry.name in ("target", "drafter") else entry.is_file() and entry.name in files
        if not is_known or entry.is_symlink():
            return f"it holds {entry.name}"
    for folder in ("target", "drafter"):
        recorded = provenance.get("weights", {}).get(folder, {})
        found = (entry.relative_to(path / folder).as_posix() for entry in sorted((path / folder).rglob("*")) if not entry.is_dir())
        if unknown := next((name for name in found if name not in recorded), None):
            return f"it holds {folder}/{unknown}"
    return None


def as_dtype(dtype: Any) -> np.dtype:
    """Read a dtype or its name. Raises ValueError for anything but float32, bfloat16 and float16."""
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {name}.")
    return jnp.dtype(name)


def build_target(config: TargetConfig, dtype: Any) -> Target:
    """Build a target whose leaves are shapes without values."""
    return nnx.eval_shape(lambda: Target(config, dtype=dtype, rngs=nnx.Rngs(0)))


def build_drafter(config: DrafterConfig, dtype: Any) -> Drafter:
    """Build a drafter whose leaves are shapes without values."""
    return nnx.eval_shape(lambda: Drafter(config, dtype=dtype, rngs=nnx.Rngs(0)))


def leaves(module: nnx.Module) -> dict[str, Any]:
    """Weights (or their shapes) of a module by path, such as `layers/0/attention/query_key_value/kernel`."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(module))}


def check_fits(folder: Path, stored: Mapping[str, Any], module: nnx.Module) -> None:
    """Raise ValueError listing the leaves of a folder that are not the module's: missing, unexpected, or of another shape."""
    wanted = leaves(module)
    problems = [f"missing {name}" for name in wanted.keys() - stored.keys()]
    problems += [f"unexpected {name}" for name in stored.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {tuple(stored[name].shape)}, its config needs {tuple(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in stored and tuple(stored[name].shape) != tuple(leaf.shape)
    ]
    if problems:
        raise ValueError(f"{folder} does not fit its config: {'; '.join(sorted(problems))}. Convert or train it again.")


def check_content(path: Path) -> int:
    """Compare the content of every weights file with the SHA-256 recorded when it was written; return the number of files compared.

    Raises ValueError naming the files that differ, FileNotFoundError if a folder is missing.
    """
    found = read_contents(path)
    configs = {"target": found.target_config, "drafter": found.drafter_config}
    return sum(check_whole(path / name, hashes=True) for name, config in configs.items() if config is not None)


def with_leaves(module: M, values: Mapping[str, Any]) -> M:
    """Return the module with each leaf replaced by the value at its path; every leaf must have one."""
    graph, state = nnx.split(module)
    filled = [(path, leaf.replace(values["/".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _restore(folder: Path, build: Callable[[Any], M], dtype: np.dtype | None, sharding: Shardings) -> M:
    """Fill the module of a builder from a folder of weights, after comparing paths and shapes with what the folder lists."""
    folder = folder.absolute()
    stored = stored_leaves(folder)
    if dtype is None:
        dtypes = sorted({leaf.dtype.name for leaf in stored.values()} - {"int32"})  # token maps keep theirs
        if len(dtypes) != 1:
            raise ValueError(f"{folder} holds leaves of several dtypes ({', '.join(dtypes)}); pass dtype to cast them to one.")
        dtype = as_dtype(dtypes[0])
    module = build(dtype)
    check_fits(folder, stored, module)
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    placed = {
        name: _place(f"{folder.name}/{name}", jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sharding)
        for name, leaf in leaves(module).items()
    }
    return with_leaves(module, restore_weights(folder, placed))


def _place(name: str, leaf: jax.ShapeDtypeStruct, shardings: Shardings) -> jax.ShapeDtypeStruct:
    sharding = shardings(name, leaf) if callable(shardings) else shardings
    if not isinstance(sharding, jax.sharding.Sharding):
        raise ValueError(f"sharding must give a jax.sharding.Sharding for every leaf; got {sharding!r} for {name}.")
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        raise ValueError(f"sharding of {name}, shape {leaf.shape}, does not fit: {error} Give one whose axes divide the shape.") from error
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _existing_target_config(found: Contents, path: Path) -> TargetConfig:
    if found.target_config is None:
        raise FileNotFoundError(f"{path} holds a drafter without a target ({_TARGET_CONFIG} is missing); read it with load_drafter.")
    return read_target_config(found, path)


def _check_describes(name: str, given: TargetConfig | DrafterConfig, actual: TargetConfig | DrafterConfig) -> None:
    """Raise ValueError if a config dict reads differently from its model's config; end tokens are a default, not part of the model."""
    differing = [
        field.name
        for field in dataclasses.fields(actual)
        if field.name != "eos_token_ids" and getattr(given, field.name) != getattr(actual, field.name)
    ]
    if differing:
        raise ValueError(f"{name} does not describe the model: {', '.join(differing)} differ; give the dict the model was built from.")
