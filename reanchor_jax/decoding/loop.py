"""Prefill and whole generations: the doors of the decoding rooms.

In: Models, prompts [B P] right-padded with their lengths, a key, DecodeConfig (static), Sampling (arrays).
Out: `state, info = step(...)` round by round, or a Generation.
Source: ReAnchor section 3; the target's own draws are keyed by (row, position), so every method emits the same tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from reanchor_jax.cache import Committed, init_cache, write
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.request import check_request, check_state, is_traced, make_bans, pad_ids
from reanchor_jax.decoding.retain import init_retained
from reanchor_jax.decoding.rounds import emitted_tokens, empty_emitted, empty_info, empty_trace, noise_ahead, run_round
from reanchor_jax.decoding.sampling import Bans, Sampling, banned, choose, make_sampling, row_keys
from reanchor_jax.decoding.schedule import init_acceptance
from reanchor_jax.decoding.state import Backlog, DecodeState, Generation, num_places, num_slots, resolve_config, round_up
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.decoding.walk import RUNNING, cut
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import Emitted, StepInfo

_OUTPUT_SLOTS = 64  # output buffers are a multiple of this: 40 values of max_new_tokens share one compilation


class _Request(NamedTuple):
    """What is asked of every row; prompts are right-padded."""

    prompts: Int[Array, "B P"]
    prompt_lengths: Int[Array, " B"]
    keys: Key[Array, " B"]
    sampling: Sampling
    stop_token_ids: Int[Array, " Z"]
    bans: Bans | None
    budgets: Int[Array, " B"]


class _Outputs(NamedTuple):
    """Buffers of a generation under way; emitted fields are [B buffer]."""

    emitted: Emitted
    info: StepInfo
    num_rounds: Int[Array, ""]


def generate(
    models: Models,
    prompts: Int[Array | np.ndarray, "B P"],
    prompt_lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    *,
    config: DecodeConfig,
    sampling: Sampling | None = None,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | Int[Array | np.ndarray, " Z"] = (),
    budgets: Int[Array | np.ndarray, " B"] | None = None,
    min_new_tokens: int | Int[Array | np.ndarray, " B"] = 0,
    suppressed_token_ids: Sequence[int] | Int[Array | np.ndarray, " Y"] = (),
) -> Generation:
    """Generate until every row has met a stop token or its budget; one compiled `lax.while_loop`.

    prompts: right-padded. key: one, or one per row. sampling: None is greedy.
    max_new_tokens: most tokens a row emits, prefill token included. budgets: a smaller limit per row.
    min_new_tokens: tokens a row emits before it may draw a stop token. suppressed_token_ids: ids that are never drawn.
    Equals `autoregress` with the same key token for token (float32), whatever the drafter and config.
    Raises ValueError for bad shapes and, outside a trace, bad values. Runs inside a caller's `jit`, `scan` and `vmap` too.
    """
    request = _prepare(
        models,
        prompts,
        prompt_lengths,
        key,
        config=config,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        budgets=budgets,
        min_new_tokens=min_new_tokens,
        suppressed_token_ids=suppressed_token_ids,
    )
    result = _generate(models, request, config=config, buffer_length=round_up(max_new_tokens, _OUTPUT_SLOTS))
    return _trim(result, max_new_tokens=max_new_tokens)


def autoregress(
    models: Models,
    prompts: Int[Array | np.ndarray, "B P"],
    prompt_lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    *,
    config: DecodeConfig,
    sampling: Sampling | None = None,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | Int[Array | np.ndarray, " Z"] = (),
    budgets: Int[Array | np.ndarray, " B"] | None = None,
    min_new_tokens: int | Int[Array | np.ndarray, " B"] = 0,
    suppressed_token_ids: Sequence[int] | Int[Array | np.ndarray, " Y"] = (),
) -> Generation:
    """Generate one target token a round, without the drafter: what every other method must equal. Arguments as `generate`'s."""
    return generate(
        models._replace(drafter=None),
        prompts,
        prompt_lengths,
        key,
        config=DecodeConfig.autoregressive(cache_length=config.cache_length, prefill_chunk=config.prefill_chunk),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        budgets=budgets,
        min_new_tokens=min_new_tokens,
        suppressed_token_ids=suppressed_token_ids,
    )


def prefill(
    models: Models,
    prompts: Int[Array | np.ndarray, "B P"],
    prompt_lengths: Int[Array | np.ndarray, " B"],
    key: Key[Array, ""] | Key[Array, " B"],
    *,
    config: DecodeConfig,
    sampling: Sampling | None = None,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] | Int[Array | np.ndarray, " Z"] = (),
    budgets: Int[Array | np.ndarray, " B"] | None = None,
    min_new_tokens: int | Int[Array | np.ndarray, " B"] = 0,
    suppressed_token_ids: Sequence[int] | Int[Array | np.ndarray, " Y"] = (),
) -> tuple[DecodeState, Emitted]:
    """Read the prompts in chunks, fill both caches, and emit each row's first token (one a row, in Emitted.tokens[:, 0]).

    Arguments as `generate`'s. One compiled program; runs inside a caller's `jit` too. The state may be donated to a jitted `step`.
    """
    request = _prepare(
        models,
        prompts,
        prompt_lengths,
        key,
        config=config,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        budgets=budgets,
        min_new_tokens=min_new_tokens,
        suppressed_token_ids=suppressed_token_ids,
    )
    return _begin(models, request, config=config)


def step(models: Models, state: DecodeState, *, config: DecodeConfig) -> tuple[DecodeState, StepInfo]:
    """Run one round for every row: draft, attach, merge, verify, walk, commit, retain. Unjitted; the caller jits and donates.

    Finished rows stay as they are and emit nothing. The new tokens stand in info.emitted.
    Raises ValueError if the state was made for another config.
    """
    config = resolve_config(models, config)
    check_state(state, models.drafter if config.is_speculative else None, config)
    state, emitted, info = run_round(models, state, config)
    return state, info._replace(emitted=emitted)


def _prepare(
    models,
    prompts,
    prompt_lengths,
    key,
    *,
    config,
    sampling,
    max_new_tokens,
    stop_token_ids,
    budgets,
    min_new_tokens,
    suppressed_token_ids,
) -> _Request:
    """What was asked, checked, as arrays; prompts that are no tracers are filled up to what the cache holds."""
    budgets = check_request(models, prompts, prompt_lengths, config, sampling, max_new_tokens, budgets)
    num_rows, vocab_size = np.shape(prompts)[0], models.target.config.vocab_size
    if not is_traced(prompts):
        # one prompt buffer length for every prompt: the number of prefill passes follows the real lengths
        padding = round_up(config.cache_length, config.prefill_chunk) - np.shape(prompts)[1]
        prompts = jnp.pad(jnp.asarray(prompts, jnp.int32), ((0, 0), (0, max(padding, 0))))
    return _Request(
        prompts=jnp.asarray(prompts, jnp.int32),
        prompt_lengths=jnp.asarray(prompt_lengths, jnp.int32),
        keys=row_keys(key, num_rows),
        sampling=make_sampling(num_rows) if sampling is None else sampling,
        stop_token_ids=pad_ids("stop_token_ids", stop_token_ids, vocab_size),
        bans=make_bans(suppressed_token_ids, min_new_tokens, num_rows, max_new_tokens, vocab_size),
        budgets=budgets,
    )


@partial(jax.jit, static_argnames="config")
def _begin(models, request, *, config) -> tuple[DecodeState, Emitted]:
    return _prefill(models, request, config=resolve_config(models, config))


@partial(jax.jit, static_argnames=("config", "buffer_length"))
def _generate(models, request, *, config, buffer_length) -> Generation:
    config = resolve_config(models, config)
    num_rows = request.prompts.shape[0]
    state, first = _prefill(models, request, config=config)
    block_size = 1 if models.drafter is None else models.drafter.config.block_size
    info = empty_info(num_rows)._replace(trace=empty_trace(num_rows, config, block_size))
    outputs = _Outputs(
        # a round writes P entries at once, so the buffer has room for P beyond the last token
        emitted=empty_emitted(num_rows, buffer_length + num_places(models.drafter, config)),
        info=jax.tree.map(lambda x: jnp.zeros((buffer_length, *x.shape), x.dtype), info),
        num_rounds=jnp.int32(0),
    )
    outputs = outputs._replace(emitted=_append(outputs.emitted, first))

    def advance(carry):
        state, outputs = carry
        state, emitted, info = run_round(models, state, config)
        stacked = jax.tree.map(
            lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, outputs.num_rounds, 0),
            outputs.info,
            info,
        )
        return state, _Outputs(emitted=_append(outputs.emitted, emitted), info=stacked, num_rounds=outputs.num_rounds + 1)

    state, outputs = jax.lax.while_loop(lambda carry: jnp.any(carry[0].finish == RUNNING), advance, (state, outputs))
    emitted = outputs.emitted
    is_real = jnp.arange(buffer_length)[None, :] < emitted.num_emitted[:, None]

    def trim(buffer):
        return jnp.where(is_real, buffer[:, :buffer_length], jnp.zeros((), buffer.dtype))

    return Generation(
        tokens=trim(emitted.tokens),
        lengths=emitted.num_emitted,
        log_probs=trim(emitted.log_probs),
        processed_log_probs=trim(emitted.processed_log_probs),
        finish_reasons=state.finish,
        info=outputs.info,
        num_rounds=outputs.num_rounds,
    )


@partial(jax.jit, static_argnames="max_new_tokens")
def _trim(result: Generation, *, max_new_tokens: int) -> Generation:
    """Cut buffers to the size asked for, in a program of its own: another size does not compile the generation again."""
    return result._replace(
        tokens=result.tokens[:, :max_new_tokens],
        log_probs=result.log_probs[:, :max_new_tokens],
        processed_log_probs=result.processed_log_probs[:, :max_new_tokens],
        info=jax.tree.map(lambda x: x[:max_new_tokens], result.info),
    )


def _prefill(models, request, *, config) -> tuple[DecodeState, Emitted]:
    target, drafter = models
    prompts, prompt_lengths, keys, sampling, stops, bans, budgets = request
    num_rows, prompt_size = prompts.shape
    chunk = config.prefill_chunk
    prompts = jnp.pad(prompts, ((0, 0), (0, round_up(prompt_size, chunk) - prompt_size)))
    # an id outside the vocabulary (some pad with -100) would embed as NaN, which a mask does not stop: 0 * NaN is NaN
    prompts = jnp.where(jnp.arange(prompts.shape[1])[None, :] < prompt_lengths[:, None], prompts, 0)
    dtype = target.embedding.embedding[...].dtype
    slots = num_slots(drafter, config)
    drafter = drafter if config.is_speculative else None
    taps = drafter.config.target_layer_ids if drafter else ()
    target_cache = init_cache(target.config.layers, num_rows=num_rows, num_slots=slots, dtype=dtype)
    drafter_cache = ()
    if drafter is not None:
        drafter_cache = init_cache(drafter.config.layers, num_rows=num_rows, num_slots=slots, dtype=dtype)

    def read_chunk(index, carry):
        target_cache, drafter_cache, last_states = carry
        starts = jnp.full((num_rows,), index * chunk, jnp.int32)
        tokens = jax.lax.dynamic_slice(prompts, (0, index * chunk), (num_rows, chunk))
        positions = starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
        output = target(
            tokens, positions, prompt_mask(chunk), committed=Committed(layers=target_cache, lengths=starts), target_layer_ids=taps
        )
        # that the writes wait for the states tells XLA that every read came before them: no copy of a cache
        keys_values, states = jax.lax.optimization_barrier((output.keys_values, output.states))
        target_cache = write(target_cache, keys_values, starts)
        if drafter is not None:
            features = drafter.features(output.taps)
            drafter_cache = write(drafter_cache, drafter.context_keys_values(features, positions), starts)
        is_last = positions == prompt_lengths[:, None] - 1
        found = jnp.take_along_axis(states, jnp.argmax(is_last, axis=1)[:, None, None], axis=1)[:, 0]
        return target_cache, drafter_cache, jnp.where(jnp.any(is_last, axis=1)[:, None], found, last_states)

    num_chunks = (jnp.max(prompt_lengths) + chunk - 1) // chunk
    last_states = jnp.zeros((num_rows, target.config.width), dtype)
    target_cache, drafter_cache, last_states = jax.lax.fori_loop(0, num_chunks, read_chunk, (target_cache, drafter_cache, last_states))
    noise = noise_ahead(keys, prompt_lengths, sampling, num_places=1, vocab_size=target.config.vocab_size)
    place = jnp.zeros((num_rows, 1), jnp.int32)
    is_banned = banned(bans, stops, place, vocab_size=target.config.vocab_size)
    first = choose(target.logits(last_states[:, None]), sampling, noise, place, is_banned)
    num_emitted, finish = cut(
        first.tokens,
        jnp.ones((num_rows,), jnp.int32),
        stop_token_ids=stops,
        remaining=budgets,
        finish=jnp.full((num_rows,), RUNNING, jnp.int32),
    )
    feature_width = 0 if drafter is None else drafter.config.feature_width
    state = DecodeState(
        lengths=jnp.copy(prompt_lengths),
        anchors=first.tokens[:, 0],
        remaining=budgets - num_emitted,
        finish=finish,
        keys=keys,
        sampling=sampling,
        stop_token_ids=stops,
        bans=None if bans is None else bans._replace(num_owed=bans.num_owed - num_emitted),
        target_cache=target_cache,
        drafter_cache=drafter_cache,
        retained=init_retained(num_rows, max_offsets=config.max_offsets, width=feature_width, dtype=dtype),
        acceptance=init_acceptance(num_rows),
        backlog=Backlog(
            tokens=jnp.zeros((num_rows, 0 if config.schedule is None else slots), jnp.int32),
            num_read=jnp.copy(prompt_lengths),  # an array twice in the state could not be donated
        ),
    )
    return state, emitted_tokens(first, num_emitted)


def _append(buffers: Emitted, new: Emitted) -> Emitted:
    """Write a round's tokens behind those of the rounds before; what lies past num_emitted is overwritten by the next."""

    def write_row(buffer, values, start):
        return jax.lax.dynamic_update_slice(buffer, values, (start,))

    written = {
        name: jax.vmap(write_row)(getattr(buffers, name), getattr(new, name), buffers.num_emitted)
        for name in ("tokens", "log_probs", "processed_log_probs")
    }
    return Emitted(**written, num_emitted=buffers.num_emitted + new.num_emitted)
