"""How the time of a round grows: `python -m reanchor_jax.bench.growth [--json FILE]`.

In: nothing; small models with random weights, float32, and the embedded pair; ReAnchor with 3 shifted blocks and 64 nodes unless a line
    says otherwise.
Out: a table of milliseconds and of their ratio to the first line of each part.
Source: ours.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from reanchor_jax import pairs
from reanchor_jax.bench.passes import (
    bookkeeping_seconds,
    draft_seconds,
    held_state,
    random_models,
    round_seconds,
    verify_seconds,
    write_rows,
)
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.files import check_writable
from reanchor_jax.models.drafter import Models

_SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
# SmolLM2-135M's, with the norms of Qwen3
_SMOL = _SHAPE | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_BLOCK = 16
_OFFSETS = 3


def main(arguments: list[str] | None = None) -> int:
    """Measure all parts and print them."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.bench.growth", description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--short", action="store_true", help="the first two lines of each part, to see that it works")
    args = parser.parse_args(arguments)
    try:
        if args.json is not None:
            check_writable(args.json)
    except OSError as error:
        parser.error(str(error))
    rows = []
    with tqdm(_parts(is_short=args.short), unit="line", disable=not sys.stderr.isatty()) as progress:
        for part, line, milliseconds in progress:
            first = next((row["milliseconds"] for row in rows if row["part"] == part), milliseconds)
            rows.append({"part": part, "line": line, "milliseconds": milliseconds, "ratio": milliseconds / first})
            progress.write(f"{part:32} {line:>27} {milliseconds:10.3f} ms {milliseconds / first:7.2f}", file=sys.stdout)
    if args.json is not None:
        write_rows(args.json, rows)
    return 0


def _parts(*, is_short: bool) -> Iterator[tuple[str, str, float]]:
    """Name of the part, what varies, milliseconds."""

    def some(values):
        return values[:2] if is_short else values

    models = _models({})
    for capacity in some((1024, 4096, 16384, 32768)):
        yield "capacity, 512 tokens of context", str(capacity), _round(models, capacity, 512)
    for context in some((256, 512, 1024, 2048, 4096, 8192)):
        yield "context, capacity 8704", str(context), _round(models, 8704, context)
    for nodes in some((16, 32, 64, 128, 256)):
        yield "nodes", str(nodes), _round(models, 1024, 512, num_nodes=nodes)
    for rows in some((1, 2, 4, 8, 16)):
        yield "batch", str(rows), _round(models, 1024, 512, num_rows=rows)
    for vocab_size in some((512, 4096, 32768, 151936)):
        yield "vocabulary", str(vocab_size), _round(_models({"vocab_size": vocab_size}), 1024, 512)
    smol = random_models(_SMOL | ({"num_hidden_layers": 3} if is_short else {}), block_size=_BLOCK, num_drafter_layers=5, dtype=jnp.float32)
    yield from _stages("stages, SmolLM2-135M's shape", smol, _config(1024, 64), context=512)
    pair = pairs.load_pair("stories260k")
    sizes = {"cache_length": 448, "block_buckets": (), "node_buckets": ()}
    yield from _stages("stages, embedded pair, chain", pair, DecodeConfig.dflash(**sizes), context=100)
    whole = DecodeConfig.reanchor(num_nodes=64, **sizes)
    yield from _stages("stages, embedded pair, ReAnchor", pair, whole, context=100)


def _stages(part: str, models: Models, config: DecodeConfig, *, context: int) -> Iterator[tuple[str, str, float]]:
    """Stages of a round with all its blocks, beside a pass over one token; what they leave of a round is features and retained states."""
    config = config.resolve(_BLOCK)
    state = held_state(models, config, context)
    found = {
        "one token": verify_seconds(models, state, 1),
        "draft": draft_seconds(models, state, config, 1 + config.max_offsets),
        "verify": verify_seconds(models, state, max(config.num_nodes, _BLOCK)),
        "attach, merge, walk, commit": bookkeeping_seconds(models, state, config),
        "round": round_seconds(models, state, config),
    }
    for line, seconds in found.items():
        yield part, line, 1e3 * seconds


def _models(changes: dict[str, Any]) -> Models:
    return random_models(_SHAPE | changes, block_size=_BLOCK, num_drafter_layers=2, dtype=jnp.float32)


def _config(capacity: int, num_nodes: int) -> DecodeConfig:
    sizes = {"max_offsets": _OFFSETS, "num_nodes": num_nodes, "block_buckets": (), "node_buckets": ()}
    return DecodeConfig.reanchor(cache_length=capacity - (2 * _BLOCK - 1), **sizes)


def _round(models: Models, capacity: int, context: int, *, num_nodes: int = 64, num_rows: int = 1) -> float:
    config = _config(capacity, num_nodes)
    return 1e3 * round_seconds(models, held_state(models, config, context, num_rows=num_rows), config)


if __name__ == "__main__":
    sys.exit(main())
