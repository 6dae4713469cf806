"""Check the kernel and time a round's passes on a Hopper GPU, random weights: `python -m reanchor_jax.bench.gpu_check --out FILE`.

In: nothing but a GPU; --tiny runs small shapes anywhere, to see that the script works.
Out: one JSON file, a section at a time; sections that it holds are not measured again, so an interrupted run goes on.
Source: shapes of the published Qwen3-4B and 8B and of their DFlash drafters; tau and speedup of ReAnchor's Table 2, temperature 0.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from reanchor_jax.bench.passes import draft_seconds, held_state, prefill_seconds, random_models, round_seconds, seconds_each, verify_seconds
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.files import check_writable, read_json
from reanchor_jax.kernels.parts import CachePart, DensePart
from reanchor_jax.kernels.tree_attention import Implementation, attend
from reanchor_jax.text import write_text

_BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}  # bytes a second, as published
# mean over the eight benchmarks of the paper: tau and speedup of the chain and of ReAnchor
_PAPER = {"Qwen3-4B": {"dflash": (5.56, 3.85), "reanchor": (6.42, 4.39)}, "Qwen3-8B": {"dflash": (5.55, 3.85), "reanchor": (6.41, 4.34)}}


class Sizes(NamedTuple):
    """What is measured.

    models: fields of config.json by name. head_shape: heads, key heads and head size of the kernel's timing and of the models.
    contexts: committed tokens. nodes, blocks: numbers that a pass verifies and drafts. num_cases: of the kernel's numerics.
    num_caches: that take turns in the kernel's timing.
    """

    models: dict[str, dict[str, int]]
    vocab_size: int
    head_shape: tuple[int, int, int]
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int
    num_cases: int
    num_caches: int


FULL = Sizes(
    models={
        "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
        "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
    },
    vocab_size=151936,
    head_shape=(32, 8, 128),
    contexts=(1024, 4096, 16384),
    nodes=(1, 16, 64, 256),
    blocks=(1, 4, 16),
    block_size=16,
    num_cases=24,
    num_caches=8,
)
TINY = Sizes(
    models={"Qwen3-8B": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}},
    vocab_size=640,
    head_shape=(4, 2, 64),
    contexts=(128,),
    nodes=(1, 16),
    blocks=(1, 4),
    block_size=4,
    num_cases=2,
    num_caches=2,
)


def main(arguments: list[str] | None = None) -> int:
    """Measure the sections that the file lacks."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.bench.gpu_check", description=__doc__)
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON file; what it holds is not measured again")
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    parser.add_argument("--seconds", metavar="S", type=float, default=420.0, help="begin no section after so many; default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        if not args.seconds > 0:
            raise ValueError(f"--seconds must be more than 0; got {args.seconds}.")
        check_writable(args.out)
        found = read_json(args.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sizes = TINY if args.tiny else FULL
    if not args.tiny and jax.default_backend() != "gpu":
        print("gpu_check: error: there is no GPU here; --tiny runs small shapes on the CPU.", file=sys.stderr)
        return 2
    sections: dict[str, Callable[[], Any]] = {
        "numerics": functools.partial(_numerics, sizes),
        "kernel": functools.partial(_kernel, sizes),
        **{f"passes {name}": functools.partial(_passes, name, sizes) for name in sizes.models},
    }
    surroundings = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "tiny": args.tiny}
    found = found or {"environment": surroundings}
    if found.get("environment") != surroundings:
        print(
            f"gpu_check: error: {args.out} holds figures of {found.get('environment')}, here it is {surroundings}; give another --out.",
            file=sys.stderr,
        )
        return 2
    start = time.perf_counter()
    with tqdm(sections.items(), unit="section", disable=not sys.stderr.isatty()) as progress:
        for name, measure in progress:
            progress.set_description(name)
            if found.get(name) is not None or time.perf_counter() - start > args.seconds:
                continue
            found[name] = measure()
            found["speedup"] = {model: _speedup(model, found[f"passes {model}"]) for model in sizes.models if found.get(f"passes {model}")}
            write_text(args.out, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    missing = [name for name in sections if found.get(name) is None]
    print(f"not measured yet: {', '.join(missing)}; give the same command again" if missing else "complete", file=sys.stderr)
    return 0


def _numerics(sizes: Sizes) -> dict[str, Any]:
    """Largest difference between the kernel in bfloat16 and the XLA twin in float32, over random tries, lengths and windows."""
    # heads, key heads and head size of the targets that there are
    shapes = [sizes.head_shape, (16, 8, 256), (16, 1, 512), (9, 3, 64)]
    largest: dict[str, float] = {}
    for seed in range(sizes.num_cases):
        heads, groups, size = shapes[seed % len(shapes)]
        rng = np.random.default_rng(seed)
        count = int(rng.choice([count for count in (1, 5, 16, 33, 64, 256) if count <= 4 * max(sizes.nodes)]))
        context = sizes.contexts[0]
        lengths = rng.integers(0, context + 1, 2).astype(np.int32)
        given = _arrays(rng, rows=2, count=count, heads=heads, groups=groups, size=size, slots=context)
        positions = jnp.asarray(lengths[:, None] + rng.integers(0, 31, (2, count)), jnp.int32)
        window, cap = [None, 70, context // 2][seed % 3], [None, None, 30.0, None, None][seed % 5]
        queries, part, cache = given
        is_real = jnp.arange(context)[None, None, :, None] < jnp.asarray(lengths)[:, None, None, None]
        cache = CachePart(keys_values=jnp.where(is_real, cache, jnp.nan), lengths=jnp.asarray(lengths))
        got = jax.jit(functools.partial(attend, window=window, cap=cap, implementation=_kernel_name()))(
            queries, positions, (part,), cache=cache
        )
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (queries, (part,), cache))
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(functools.partial(attend, window=window, cap=cap, implementation="xla"))(
                wide[0], positions, wide[1], cache=wide[2]
            )
        name = f"{heads}/{groups} heads of {size}"
        difference = jnp.max(jnp.abs(got.astype(jnp.float32) - wanted))
        largest[name] = float(np.maximum(largest.get(name, 0.0), difference))  # unlike max, it keeps a NaN
    return {"cases": sizes.num_cases, "largest_difference": largest}


def _kernel(sizes: Sizes) -> list[dict[str, Any]]:
    """Microseconds of the kernel, of XLA, and of cuDNN with the same mask, beside the time that reading the cache takes at least.

    As many caches as layers take turns, so that none of them stays in the chip's own memory.
    """
    heads, groups, size = sizes.head_shape
    found = []
    bandwidth = _BANDWIDTH.get(jax.devices()[0].device_kind)
    for context in sizes.contexts:
        for count in sizes.nodes:
            rng = np.random.default_rng(count)
            arrays = [
                _arrays(rng, rows=1, count=count, heads=heads, groups=groups, size=size, slots=context) for _ in range(sizes.num_caches)
            ]
            length = context - count - 1
            layers = [(part, cache) for _, part, cache in arrays]

            def ours(layers, queries, *, implementation, length=length, count=count):
                positions = jnp.full((1, count), length, jnp.int32)
                for part, cache in layers:
                    held = CachePart(keys_values=cache, lengths=jnp.full((1,), length, jnp.int32))
                    queries = attend(queries, positions, (part,), cache=held, implementation=implementation)
                return queries

            def cudnn(layers, queries, *, length=length, count=count, context=context):
                is_seen = jnp.broadcast_to(jnp.arange(context) < length, (1, 1, count, context))
                for part, cache in layers:
                    written = jax.lax.dynamic_update_slice(cache, part.keys_values, (0, 0, length, 0))
                    mask = jax.lax.dynamic_update_slice(is_seen, part.mask[:, None], (0, 0, 0, length))
                    keys, values = jnp.split(written.swapaxes(1, 2), 2, axis=2)
                    queries = jax.nn.dot_product_attention(queries, keys, values, mask=mask, implementation="cudnn")
                return queries

            row = {"context": context, "nodes": count, "bound_us": None}
            if bandwidth:
                row["bound_us"] = 1e6 * 2 * groups * size * 2 * (length + count) / bandwidth
            rivals: dict[str, Callable[..., Any]] = {
                "ours": functools.partial(ours, implementation=_kernel_name()),
                "xla": functools.partial(ours, implementation="xla"),
            }
            if jax.default_backend() == "gpu":
                rivals["cudnn"] = cudnn
            for name, run in rivals.items():
                try:
                    row[f"{name}_us"] = 1e6 * seconds_each(run, layers, arrays[0][0]) / sizes.num_caches
                except Exception as error:  # a rival that this installation cannot run is told, and the rest measured
                    row[f"{name}_us"] = f"{type(error).__name__}: {str(error)[:200]}"
            found.append(row)
    return found


def _passes(name: str, sizes: Sizes) -> dict[str, Any]:
    """Milliseconds of passes and whole rounds of a model with its DFlash drafter, random weights, the first context but one."""
    heads, groups, size = sizes.head_shape
    shape = {
        "vocab_size": sizes.vocab_size,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": name == "Qwen3-4B",
        **sizes.models[name],
    }
    layers = min(5, shape["num_hidden_layers"])
    models = random_models(shape, block_size=sizes.block_size, num_drafter_layers=layers, dtype=jnp.bfloat16)
    room = sizes.contexts[min(1, len(sizes.contexts) - 1)]
    context = room - 64
    num_nodes = max(*sizes.nodes, sizes.block_size)
    whole = {"cache_length": room, "block_buckets": (), "node_buckets": ()}
    config = DecodeConfig.reanchor(num_nodes=num_nodes, **whole)
    state = held_state(models, config, context)
    found: dict[str, Any] = {"context": context}
    for count in sizes.nodes:
        found[f"verify {count}"] = 1e3 * verify_seconds(models, state, count)
    for blocks in sizes.blocks:
        sized = DecodeConfig.dflash(**whole) if blocks == 1 else DecodeConfig.reanchor(max_offsets=blocks - 1, num_nodes=num_nodes, **whole)
        held = held_state(models, sized, context)
        found[f"draft {blocks}"] = 1e3 * draft_seconds(models, held, sized.resolve(sizes.block_size), blocks)
        found[f"round {blocks}"] = 1e3 * round_seconds(models, held, sized)
    found["prefill"] = 1e3 * prefill_seconds(models, config, context // 2)
    tree = DecodeConfig.reanchor_tree(max(sizes.block_size, 64), **whole)
    found["round tree"] = 1e3 * round_seconds(models, held_state(models, tree, context), tree)
    return found


def _kernel_name() -> Implementation | None:
    """The kernel by name where there is a GPU, so that one it does not run on is told; elsewhere what there is."""
    return "pallas" if jax.default_backend() == "gpu" else None


def _speedup(name: str, passes: dict[str, float]) -> dict[str, Any]:
    """What the measured rounds make of the paper's tau, beside the paper's own speedup; and what of a round is neither draft nor verify."""
    one = passes["verify 1"]
    most = max(int(key.split()[1]) for key in passes if key.startswith("draft "))
    rounds = {"dflash": passes["round 1"], "reanchor": passes[f"round {most}"]}
    found: dict[str, Any] = {
        method: {"tau": tau, "paper": paper, "implied": tau * one / rounds[method] if rounds[method] else None}
        for method, (tau, paper) in _PAPER[name].items()
    }
    largest = max(int(key.split()[1]) for key in passes if key.startswith("verify "))
    found["rest_ms"] = passes[f"round {most}"] - passes[f"draft {most}"] - passes[f"verify {largest}"]
    return found


def _arrays(
    rng: np.random.Generator, *, rows: int, count: int, heads: int, groups: int, size: int, slots: int
) -> tuple[Array, DensePart, Array]:
    """Queries, a part in which every node sees itself and some of those before it, and a cache."""

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    mask = np.tril(rng.random((rows, count, count)) < 0.3) | np.eye(count, dtype=bool)
    part = DensePart(keys_values=normal(rows, 2 * groups, count, size), mask=jnp.asarray(mask))
    return normal(rows, count, heads, size), part, normal(rows, 2 * groups, slots, size)


if __name__ == "__main__":
    sys.exit(main())
