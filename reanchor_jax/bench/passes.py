"""Time passes and whole rounds of models with random weights, inside compiled loops.

In: shapes as config.json dicts, a DecodeConfig, a number of committed tokens.
Out: Models, a DecodeState, seconds.
Source: ours. The work of a round does not depend on what the weights say; but for the prefill, figures are a long run less a short one.
"""

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from reanchor_jax.cache import Committed, gather, write
from reanchor_jax.decoding.attach import Match, find_sites, make_paths
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.draft import draft_blocks
from reanchor_jax.decoding.loop import prefill, step
from reanchor_jax.decoding.state import DecodeState, num_places
from reanchor_jax.decoding.trie import merge
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.decoding.walk import RUNNING, walk
from reanchor_jax.huggingface import read_drafter, read_target
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.text import write_text

REPEATS = 5  # runs, of which the fastest counts: what else the machine does only ever adds, and the first may compile
_FEW, _MANY = 4, 16  # rounds of a short and a long run


def random_models(shape: Mapping[str, Any], *, block_size: int, num_drafter_layers: int, dtype: DTypeLike) -> Models:
    """A target of a Qwen3 config.json's shape with a DFlash drafter, normal weights of standard deviation 0.02."""
    num_layers = shape["num_hidden_layers"]
    target = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **shape}
    drafter = {
        **target,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": num_drafter_layers,
        "num_target_layers": num_layers,
        "tie_word_embeddings": False,
        "block_size": block_size,
        "dflash_config": {
            "mask_token_id": 0,
            "target_layer_ids": np.unique(np.linspace(min(1, num_layers - 2), max(num_layers - 3, 0), 5).astype(int)).tolist(),
        },
    }
    shapes = nnx.eval_shape(
        lambda: Models(
            target=Target(read_target(target), dtype=dtype, rngs=nnx.Rngs(0)),
            drafter=Drafter(read_drafter(drafter), dtype=dtype, rngs=nnx.Rngs(0)),
        )
    )
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def draw(key, shape, dtype):
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    return jax.tree.unflatten(structure, [draw(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)])


def held_state(models: Models, config: DecodeConfig, context: int, *, num_rows: int = 1) -> DecodeState:
    """The state behind a short prompt, its length set to so many committed tokens."""
    run = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))
    prompt = np.ones((num_rows, 8), np.int32), np.full(num_rows, 8, np.int32)
    state, _ = run(models, *prompt, jax.random.key(0), config=config, max_new_tokens=8)
    return state._replace(lengths=jnp.full_like(state.lengths, context), remaining=jnp.full_like(state.remaining, config.cache_length))


def round_seconds(models: Models, state: DecodeState, config: DecodeConfig) -> float:
    """Seconds of a round at the lengths given, with as many states to draft from as there can be."""
    held = {"lengths": state.lengths, "remaining": state.remaining}
    full = jnp.full_like(state.lengths, state.retained.tokens.shape[1])

    def run(given, new):
        models, held, full = given
        new, _ = step(models, new, config=config)
        return new._replace(**held, finish=jnp.full_like(full, RUNNING), retained=new.retained._replace(counts=full))

    return seconds_each(run, (models, held, full), state)


def verify_seconds(models: Models, state: DecodeState, num_nodes: int) -> float:
    """Seconds of a target pass over so many tokens, the choice of the likeliest included."""
    assert models.drafter is not None
    taps = models.drafter.config.target_layer_ids

    def run(given, tokens):
        models, layers, lengths = given
        output = models.target(
            tokens,
            lengths[:, None] + jnp.arange(num_nodes, dtype=jnp.int32)[None, :],
            prompt_mask(num_nodes),
            committed=Committed(layers=layers, lengths=lengths),
            target_layer_ids=taps,
        )
        return jnp.argmax(models.target.logits(output.states), axis=-1).astype(jnp.int32)

    tokens = jnp.zeros((state.lengths.shape[0], num_nodes), jnp.int32)
    return seconds_each(run, (models, state.target_cache, state.lengths), tokens)


def draft_seconds(models: Models, state: DecodeState, config: DecodeConfig, num_blocks: int) -> float:
    """Seconds of drafting so many blocks and finding where they attach, greedily; config is resolved."""
    drafter, num_rows = models.drafter, state.lengths.shape[0]
    assert drafter is not None
    noise = jnp.zeros((num_rows, num_places(drafter, config), models.target.config.vocab_size), jnp.float32)

    def run(given, anchors):
        models, state, noise = given
        drafted = draft_blocks(
            models.target,
            models.drafter,
            anchors,
            Committed(layers=state.drafter_cache, lengths=state.lengths),
            state.retained._replace(counts=jnp.full_like(anchors, num_blocks - 1)),
            state.keys,
            state.sampling,
            noise,
            is_running=anchors >= 0,
            num_blocks=num_blocks,
            config=config,
        )
        return jnp.min(drafted.tokens, axis=(1, 2))

    return seconds_each(run, (models, state, noise), state.anchors)


def bookkeeping_seconds(models: Models, state: DecodeState, config: DecodeConfig) -> float:
    """Seconds of a round without its models: attach, merge, walk and commit of given blocks; config is resolved, states' entries are 0."""
    assert models.drafter is not None
    places = num_places(models.drafter, config)
    num_rows, num_blocks = state.lengths.shape[0], 1 + config.max_offsets
    blocks = jax.random.randint(jax.random.key(0), (num_rows, num_blocks, models.drafter.config.block_size), 0, 4, jnp.int32)
    zeros = tuple(jnp.zeros((*x.shape[:2], config.num_nodes, x.shape[3]), x.dtype) for x in state.target_cache)
    context = tuple(jnp.zeros((*x.shape[:2], places, x.shape[3]), x.dtype) for x in state.drafter_cache)

    def run(given, value):
        blocks, zeros, context, lengths = given
        target_cache, drafter_cache, shift = value
        blocks = blocks + shift[:, None, None]
        match = Match(
            anchors=blocks[:, :, 0],
            is_block=jnp.ones(blocks.shape[:2], bool),
            offsets=jnp.broadcast_to(jnp.arange(num_blocks, dtype=jnp.int32), blocks.shape[:2]),
            continuations=blocks[:, :, 1:],
            seconds=blocks[:, 0, 1:],
            scores=jnp.zeros(blocks.shape, jnp.float32),
        )
        sites = find_sites(blocks[:, 0], match, rule=config.attach)
        kept = jnp.full(sites.shape, blocks.shape[2], jnp.int32)
        trie = merge(make_paths(blocks, sites, kept), num_nodes=config.num_nodes)
        walked = walk(
            trie,
            trie.tokens,
            num_places=places,
            stop_token_ids=state.stop_token_ids,
            remaining=state.remaining,
            finish=state.finish,
        )
        written = write(target_cache, gather(zeros, walked.nodes), lengths), write(drafter_cache, context, lengths)
        return *written, walked.num_emitted

    given = blocks, zeros, context, state.lengths
    return seconds_each(run, given, (state.target_cache, state.drafter_cache, jnp.zeros_like(state.lengths)), times=25)


def prefill_seconds(models: Models, config: DecodeConfig, num_tokens: int) -> float:
    """Seconds of reading a prompt of so many tokens, both caches filled."""
    run = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))
    prompt = np.ones((1, num_tokens), np.int32), np.full(1, num_tokens, np.int32)
    return fastest(lambda key: run(models, *prompt, key, config=config, max_new_tokens=8), lambda: jax.random.key(0))[0]


def seconds_each(run: Callable[[Any, Any], Any], given: Any, value: Any, *, times: int = 1) -> float:
    """Seconds of one run(given, value) -> value. times: by how much longer both runs are, for what takes microseconds."""

    @functools.partial(jax.jit, donate_argnums=2)
    def repeat(count, given, value):
        return jax.lax.fori_loop(0, count, lambda _, value: run(given, value), value)

    def of(count):
        return fastest(lambda fresh: repeat(jnp.int32(count), given, fresh), lambda: jax.tree.map(jnp.copy, value))[0], count

    return difference(of(times * _FEW), of(times * _MANY))


def fastest(run: Callable[[Any], Any], fresh: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the fastest of several run(fresh()), and what the last returned; making the argument is not timed."""
    times, found = [], None
    for _ in range(REPEATS):
        given = jax.block_until_ready(fresh())
        begin = time.perf_counter()
        found = jax.block_until_ready(run(given))
        times.append(time.perf_counter() - begin)
    return min(times), found


def difference(few: tuple[float, int], many: tuple[float, int]) -> float:
    """Seconds of one unit from the seconds and units of a short and a long run, so that what a call takes by itself is left out."""
    # on a machine that stumbled in every short run, the long one still tells the order of size
    return max((many[0] - few[0]) / (many[1] - few[1]), 0.1 * many[0] / many[1])


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write figures as JSON, with the device and the version they were measured on."""
    write_text(path, json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, indent=1) + "\n")
