"""Tell what a directory holds and what memory it needs, without reading its weights.

In: a directory in the layout of `checkpoint`; rows and tokens to hold.
Out: tables as text.
Source: its configs, provenance, and the shapes Orbax lists; `cache` says how caches lie.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from reanchor_jax import checkpoint
from reanchor_jax.config import DrafterConfig, TargetConfig, check_pair
from reanchor_jax.weights import num_bytes, stored_leaves


def describe(path: Path | str, *, drafter: Path | str | None = None) -> str:
    """Tell in a table what a directory holds: sizes, parameters, bytes, cache bytes per token, provenance.

    drafter: directory of a drafter to tell of in place of the one beside the target.
    Reads no weights. Raises FileNotFoundError and ValueError as `checkpoint.load`, where that can be known without them.
    """
    path, drafter_path = Path(path), Path(path if drafter is None else drafter)
    found, drafter_found = _contents(path, drafter_path)
    columns: dict[str, dict[str, str]] = {}
    target = None
    if found.target_config is not None:
        target = checkpoint.read_target_config(found, path)
        rows = {"architecture": target.family, "vocabulary": f"{target.vocab_size:,}", "tied head": "yes" if target.is_tied else "no"}
        rows["end tokens"] = " ".join(map(str, target.eos_token_ids)) or "none"
        columns["target"] = {**_shape_rows(target), **rows, **_weight_rows(path, "target", target)}
    if drafter_found.drafter_config is not None:
        config = checkpoint.read_drafter_config(drafter_found, drafter_path)
        if target is not None:
            check_pair(target, config)
        rows = {"architecture": _family(config), "vocabulary": f"{config.vocab_size:,}", "block size": str(config.block_size)}
        rows |= {"slot k predicts": "the next position" if config.is_shifted else "its own position"}
        rows |= {"mask token": str(config.mask_token_id), "tapped layers": " ".join(map(str, config.target_layer_ids))}
        columns["drafter"] = {**_shape_rows(config), **rows, **_weight_rows(drafter_path, "drafter", config)}
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    table = [["", *columns], *([name, *(rows.get(name, "") for rows in columns.values())] for name in names)]
    lines = [str(path), *([] if drafter is None else [str(drafter_path)]), *_columns(table)]
    lines.append(f"files: {', '.join(found.files) or 'no tokenizer'}")
    told = {name: value for name, value in drafter_found.provenance.items() if name != "weights"}  # checksums: long, and nothing to read
    lines.append(f"provenance: {json.dumps(told, indent=2) if told else 'none recorded'}")
    return "\n".join(lines)


def describe_memory(path: Path | str, *, batch: int, context: int, drafter: Path | str | None = None) -> str:
    """Tell in a table the bytes of weights and caches for `batch` rows of `context` tokens, in the dtype that is stored.

    Layers with a sliding window hold every token all the same. Not counted: the slots of one round (two blocks and rounding up), and what
    a pass holds while it runs.
    drafter: as in `describe`. Raises as that, and ValueError if the target was made for fewer tokens.
    """
    rows = memory_bytes(path, batch=batch, context=context, drafter=drafter)
    rows["total"] = sum(rows.values())
    sizes = [(f"{value:,}", f"{value / 2**30:.2f} GiB") for value in rows.values()]
    widths = [max(map(len, column)) for column in zip(*sizes, strict=True)]
    table = [[name, *(cell.rjust(width) for cell, width in zip(size, widths, strict=True))] for name, size in zip(rows, sizes, strict=True)]
    return "\n".join([f"memory for a batch of {batch:,} and a context of {context:,} tokens, in bytes:", *_columns(table)])


def memory_bytes(path: Path | str, *, batch: int, context: int, drafter: Path | str | None = None) -> dict[str, int]:
    """The bytes that `describe_memory` tells: of the weights, and of the caches of target and drafter."""
    path, drafter_path = Path(path), Path(path if drafter is None else drafter)
    found, drafter_found = _contents(path, drafter_path)
    weights, caches = 0, {}
    if found.target_config is not None:
        target = checkpoint.read_target_config(found, path)
        if context > target.max_positions:
            raise ValueError(f"context ({context}) exceeds the {target.max_positions} positions the target was made for; lower it.")
        weights += sum(map(num_bytes, stored_leaves(path / "target").values()))
        caches["target cache"] = batch * context * _cache_bytes(path, target)
    if drafter_found.drafter_config is not None:
        weights += sum(map(num_bytes, stored_leaves(drafter_path / "drafter").values()))
        caches["drafter cache"] = batch * context * _cache_bytes(path, checkpoint.read_drafter_config(drafter_found, drafter_path))
    return {"weights": weights, **caches}


def _contents(path: Path, drafter_path: Path) -> tuple[checkpoint.Contents, checkpoint.Contents]:
    found = checkpoint.read_contents(path)
    return found, found if drafter_path == path else checkpoint.read_contents(drafter_path)


def _family(drafter: DrafterConfig) -> str:
    """Backbone, context and heads of a drafter in words."""
    parts = [drafter.family, "dflare context" if drafter.fusion == "per_layer" else "dflash context"]
    parts += [] if drafter.head is None else [drafter.head.kind.replace("_", " ") + " head"]
    parts += [] if drafter.confidence is None else ["confidence"]
    parts += [] if drafter.mixture is None else [f"mixture of {drafter.mixture.num_components}"]
    parts += ["own embedding"] if drafter.has_embedding else []
    parts += (
        ["own head" if drafter.draft_vocab_size is None else f"own head of {drafter.draft_vocab_size:,} tokens"] if drafter.has_head else []
    )
    return ", ".join(parts)


def _shape_rows(config: TargetConfig | DrafterConfig) -> dict[str, str]:
    def each(values) -> str:
        return " ".join(dict.fromkeys(str(value) for value in values))

    return {
        "architecture": "",
        "layers": str(config.num_layers),
        "width": f"{config.width:,}",
        "heads / key-value heads": f"{config.num_heads} / {each(layer.num_kv_heads for layer in config.layers)}",
        "head size": each(layer.head_size for layer in config.layers),
        "MLP width": f"{config.mlp_width:,}",
        "window": each(layer.window or "none" for layer in config.layers),
        "rotary": each(f"{layer.rope.kind} theta {layer.rope.theta:g}" for layer in config.layers),
    }


def _weight_rows(path: Path, name: str, config: TargetConfig | DrafterConfig) -> dict[str, str]:
    leaves = stored_leaves(path / name)
    is_target = isinstance(config, TargetConfig)
    module = checkpoint.build_target(config, jnp.float32) if is_target else checkpoint.build_drafter(config, jnp.float32)
    checkpoint.check_fits(path / name, leaves, module)
    stored = leaves.values()
    return {
        "parameters": f"{sum(math.prod(leaf.shape) for leaf in stored):,}",
        "dtype": " ".join(sorted({leaf.dtype.name for leaf in stored})),
        "bytes of weights": f"{sum(map(num_bytes, stored)):,}",
        "cache bytes per token": f"{_cache_bytes(path, config):,}",
    }


def _cache_bytes(path: Path, config: TargetConfig | DrafterConfig) -> int:
    """Bytes that a token takes in the caches of all layers; the drafter's are of the target's dtype."""
    first = path / "target" if (path / "target").is_dir() else path / "drafter"
    itemsize = max(leaf.dtype.itemsize for leaf in stored_leaves(first).values())
    return sum(2 * layer.num_kv_heads * layer.head_size * itemsize for layer in config.layers)


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
