"""Tell what a directory holds, without reading its weights.

In: a directory in the layout of `checkpoint`.
Out: a table as text.
Source: its configs, provenance, and the shapes Orbax lists.
"""

import json
from pathlib import Path

import numpy as np

from reanchor_jax import checkpoint
from reanchor_jax.config import DrafterConfig, TargetConfig


def describe(path: Path | str) -> str:
    """Tell in a table what a directory holds: sizes, parameters, bytes, cache bytes per token, provenance.

    Reads no weights. Raises FileNotFoundError and ValueError as `checkpoint.read_contents` and `checkpoint.stored_leaves`.
    """
    path = Path(path)
    found = checkpoint.read_contents(path)
    columns: dict[str, dict[str, str]] = {}
    if found.target_config is not None:
        target = checkpoint.read_target_config(found, path)
        rows = {"architecture": target.family, "vocabulary": f"{target.vocab_size:,}", "tied head": "yes" if target.is_tied else "no"}
        rows["end tokens"] = " ".join(map(str, target.eos_token_ids)) or "none"
        columns["target"] = {**_shape_rows(target), **rows, **_weight_rows(path / "target", target)}
    if found.drafter_config is not None:
        drafter = checkpoint.read_drafter_config(found, path)
        rows = {"architecture": "dflash", "vocabulary": f"{drafter.vocab_size:,}", "block size": str(drafter.block_size)}
        rows |= {"mask token": str(drafter.mask_token_id), "tapped layers": " ".join(map(str, drafter.target_layer_ids))}
        columns["drafter"] = {**_shape_rows(drafter), **rows, **_weight_rows(path / "drafter", drafter)}
    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    table = [["", *columns], *([name, *(rows.get(name, "") for rows in columns.values())] for name in names)]
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]))]
    lines = [str(path), *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)]
    lines.append(f"files: {', '.join(found.files) or 'no tokenizer'}")
    told = {name: value for name, value in found.provenance.items() if name != "weights"}  # checksums: long, and nothing to read
    lines.append(f"provenance: {json.dumps(told, indent=2) if told else 'none recorded'}")
    return "\n".join(lines)


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


def _weight_rows(folder: Path, config: TargetConfig | DrafterConfig) -> dict[str, str]:
    stored = checkpoint.stored_leaves(folder).values()
    num_parameters = sum(int(np.prod(leaf.shape)) for leaf in stored)
    num_bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in stored)
    itemsize = max(leaf.dtype.itemsize for leaf in stored)
    cache_bytes = sum(2 * layer.num_kv_heads * layer.head_size * itemsize for layer in config.layers)
    return {
        "parameters": f"{num_parameters:,}",
        "dtype": " ".join(sorted({leaf.dtype.name for leaf in stored})),
        "bytes of weights": f"{num_bytes:,}",
        "cache bytes per token": f"{cache_bytes:,}",
    }
