"""Save and load Models as self-contained directories: weights, configs, tokenizer, provenance.

In: a directory: `target/` and `drafter/` (Orbax), `target_config.json` and `drafter_config.json` (Hugging Face config dicts),
    `generation_config.json`, tokenizer files, `provenance.json`. Either model may be absent.
Out: Models; or such a directory, written under a temporary name and renamed when complete.
Source: Orbax StandardCheckpoint. Restoring always takes an abstract tree with shardings, so weights saved anywhere load anywhere.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from reanchor_jax.config import DrafterConfig, TargetConfig, check_pair
from reanchor_jax.files import PROVENANCE, changed_files, fresh_directory, read_json, record_files
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target

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

M = TypeVar("M", bound=nnx.Module)


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


def load(path: Path | str, *, dtype: Any = None) -> Models:
    """Read target and, where the directory has one, drafter.

    dtype: float32, bfloat16 or float16, cast while reading; None keeps what is stored.
    Raises FileNotFoundError if the directory or its target is missing, ValueError for weights that do not fit the config or cannot be read.
    """
    path, dtype = Path(path), None if dtype is None else as_dtype(dtype)
    found = read_contents(path)
    if found.target_config is None:
        raise FileNotFoundError(f"{path} holds a drafter without a target ({_TARGET_CONFIG} is missing); read it with load_drafter.")
    target_config = read_target_config(found, path)
    drafter_config = None if found.drafter_config is None else read_drafter_config(found, path)
    if drafter_config is not None:
        check_pair(target_config, drafter_config)
    return Models(
        target=_restore(path / "target", lambda dtype: build_target(target_config, dtype), dtype),
        drafter=None if drafter_config is None else _restore(path / "drafter", lambda dtype: build_drafter(drafter_config, dtype), dtype),
    )


def load_drafter(path: Path | str, *, dtype: Any = None) -> Drafter:
    """Read the drafter of a directory, with or without a target beside it; dtype and errors as in `load`."""
    path, dtype = Path(path), None if dtype is None else as_dtype(dtype)
    found = read_contents(path)
    if found.drafter_config is None:
        raise FileNotFoundError(f"{path} holds no drafter ({_DRAFTER_CONFIG} is missing); train or convert one first.")
    config = read_drafter_config(found, path)
    return _restore(path / "drafter", lambda dtype: build_drafter(config, dtype), dtype)


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
    overwrite: replace a directory written by this function; anything else that is not an empty directory is refused.
    Raises ValueError if a config dict does not describe its model, FileExistsError if the path is taken.
    """
    generation = (files or {}).get("generation_config.json")
    if generation is not None:
        generation = json.loads(generation if isinstance(generation, bytes) else Path(generation).read_bytes())
    _check_describes("target_config", TargetConfig.from_huggingface(target_config, generation), models.target.config)
    modules: dict[str, nnx.Module] = {"target": models.target}
    configs = {_TARGET_CONFIG: dict(target_config)}
    if (models.drafter is None) != (drafter_config is None):
        raise ValueError("models.drafter and drafter_config go together: give both or neither.")
    if models.drafter is not None and drafter_config is not None:
        _check_describes("drafter_config", DrafterConfig.from_huggingface(drafter_config), models.drafter.config)
        modules["drafter"] = models.drafter
        configs[_DRAFTER_CONFIG] = dict(drafter_config)
    return _write(path, modules, configs, extra=files or {}, provenance=provenance or {}, overwrite=overwrite)


def save_drafter(
    path: Path | str,
    drafter: Drafter,
    *,
    drafter_config: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a directory with a drafter only, as training makes it; arguments and errors as in `save`."""
    _check_describes("drafter_config", DrafterConfig.from_huggingface(drafter_config), drafter.config)
    configs = {_DRAFTER_CONFIG: dict(drafter_config)}
    return _write(path, {"drafter": drafter}, configs, extra={}, provenance=provenance or {}, overwrite=overwrite)


def read_contents(path: Path) -> Contents:
    """Read everything but the weights. Raises FileNotFoundError if the path is no directory of ours, ValueError for broken JSON."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give the directory that convert or train wrote.")
    if not is_directory_of_ours(path):
        hint = "it looks like a Hugging Face checkpoint: convert it first (reanchor-jax convert)" if (path / "config.json").exists() else ""
        raise FileNotFoundError(
            f"{path} holds neither {_TARGET_CONFIG} nor {_DRAFTER_CONFIG}; {hint or 'give the directory that convert or train wrote'}."
        )
    return Contents(
        target_config=read_json(path / _TARGET_CONFIG),
        drafter_config=read_json(path / _DRAFTER_CONFIG),
        generation_config=read_json(path / "generation_config.json"),
        provenance=read_json(path / PROVENANCE) or {},
        files={name: path / name for name in ("generation_config.json", *TOKENIZER_FILES) if (path / name).is_file()},
    )


def read_target_config(found: Contents, path: Path) -> TargetConfig:
    """Build the TargetConfig of a directory's contents. Raises ValueError naming the path for a config that does not hold."""
    try:
        return TargetConfig.from_huggingface(found.target_config or {}, found.generation_config)
    except ValueError as error:
        raise ValueError(f"the target config of {path}: {error}") from error


def read_drafter_config(found: Contents, path: Path) -> DrafterConfig:
    """Build the DrafterConfig of a directory's contents. Raises ValueError naming the path for a config that does not hold."""
    try:
        return DrafterConfig.from_huggingface(found.drafter_config or {})
    except ValueError as error:
        raise ValueError(f"the drafter config of {path}: {error}") from error


def is_directory_of_ours(path: Path) -> bool:
    """Whether `save` or `save_drafter` wrote this directory."""
    return (path / _TARGET_CONFIG).is_file() or (path / _DRAFTER_CONFIG).is_file()


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
    """Weights (or their shapes) of a module by path, such as `layers/0/attention/query/kernel`."""
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(module))}


def stored_leaves(folder: Path) -> dict[str, Any]:
    """Shapes and dtypes of the weights an Orbax folder (`DIR/target`, `DIR/drafter`) lists, by path; no weights are read.

    Raises FileNotFoundError if the folder is missing, ValueError if it cannot be read.
    """
    folder = folder.absolute()
    _check_whole(folder)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(folder).item_metadata
    except Exception as error:
        raise ValueError(
            f"{folder} cannot be read, a file in it is truncated or damaged ({_first_line(error)}); write it again."
        ) from error
    if metadata is None:
        raise ValueError(f"{folder} cannot be read, a file in it is truncated, damaged or missing; write it again.")
    return _flatten(metadata.tree)


def check_content(path: Path) -> int:
    """Compare the content of every weights file with the SHA-256 recorded when it was written; return the number of files compared.

    Raises ValueError naming the files that differ, FileNotFoundError if a folder is missing.
    """
    found = read_contents(path)
    configs = {"target": found.target_config, "drafter": found.drafter_config}
    return sum(_check_whole(path / name, hashes=True) for name, config in configs.items() if config is not None)


def with_leaves(module: M, values: Mapping[str, Any]) -> M:
    """Return the module with each leaf replaced by the value at its path; every leaf must have one."""
    graph, state = nnx.split(module)
    filled = [(path, leaf.replace(values["/".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _write(
    path: Path | str,
    modules: Mapping[str, nnx.Module],
    configs: Mapping[str, dict[str, Any]],
    *,
    extra: Mapping[str, Path | bytes],
    provenance: Mapping[str, Any],
    overwrite: bool,
) -> Path:
    for name in extra:
        if name != "generation_config.json" and name not in TOKENIZER_FILES:
            raise ValueError(f"files holds {name!r}; known are generation_config.json, {', '.join(TOKENIZER_FILES)}.")
    about = {
        "project": "reanchor-jax",
        "version": importlib.metadata.version("reanchor-jax"),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtype": {name: sorted({leaf.dtype.name for leaf in leaves(module).values()})[0] for name, module in modules.items()},
    }
    path = Path(path)
    with fresh_directory(path, may_replace=is_directory_of_ours if overwrite else None) as fresh:
        for name, content in extra.items():
            (fresh / name).write_bytes(content if isinstance(content, bytes) else Path(content).read_bytes())
        for name, module in modules.items():
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save(fresh / name, args=ocp.args.StandardSave(_nest(leaves(module))))
            marker = fresh / name / "commit_success.txt"
            if marker.exists():  # Orbax writes the path on this machine into it, of a folder that will be renamed
                marker.write_text("Checkpoint commit was successful\n", encoding="utf-8")
        provenance = {**about, **provenance, "weights": {name: record_files(fresh / name) for name in modules}}
        for name, config in {**configs, PROVENANCE: provenance}.items():
            (fresh / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _restore(folder: Path, build: Callable[[Any], M], dtype: np.dtype | None) -> M:
    """Fill the module of a builder from an Orbax folder, after comparing paths and shapes with what the folder lists."""
    folder = folder.absolute()
    stored = stored_leaves(folder)
    if dtype is None:
        dtypes = sorted({leaf.dtype.name for leaf in stored.values()})
        if len(dtypes) != 1:
            raise ValueError(f"{folder} holds leaves of several dtypes ({', '.join(dtypes)}); pass dtype to cast them to one.")
        dtype = as_dtype(dtypes[0])
    module = build(dtype)
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
    sharding = jax.sharding.SingleDeviceSharding(jnp.zeros(()).device)
    abstract = {name: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding) for name, leaf in wanted.items()}
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            tree = checkpointer.restore(folder, args=ocp.args.StandardRestore(_nest(abstract)))
    except Exception as error:  # tensorstore has no common base class for damaged files
        raise ValueError(
            f"{folder} cannot be read, a file in it is truncated or damaged ({_first_line(error)}); write it again."
        ) from error
    return with_leaves(module, _flatten(tree))


def _check_whole(folder: Path, *, hashes: bool = False) -> int:
    """Compare a folder with the record beside it, if there is one: tensorstore tells less, and its late threads write to the terminal."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing although its config is there; convert or train it again.")
    recorded = (read_json(folder.parent / PROVENANCE) or {}).get("weights", {}).get(folder.name, {})
    if changed := changed_files(folder, recorded, hashes=hashes):
        raise ValueError(f"{folder} is damaged: {'; '.join(changed)}. Copy it again from its source, or convert or train it again.")
    return len(recorded)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[name] = leaf
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flatten(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _check_describes(name: str, given: TargetConfig | DrafterConfig, actual: TargetConfig | DrafterConfig) -> None:
    """Raise ValueError if a config dict reads differently from its model's config; end tokens are a default, not part of the model."""
    differing = [
        field.name
        for field in dataclasses.fields(actual)
        if field.name != "eos_token_ids" and getattr(given, field.name) != getattr(actual, field.name)
    ]
    if differing:
        raise ValueError(f"{name} does not describe the model: {', '.join(differing)} differ; give the dict the model was built from.")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
