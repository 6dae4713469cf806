"""Prefill, one round, a whole generation: the only file that knows every stage.

In: Models, prompts [B P] right-padded with their lengths, a key, DecodeConfig (static), Sampling (arrays).
Out: `state, info = step(...)` round by round, or a Generation.
Source: ReAnchor section 3; whatever is drafted, the emitted tokens are the target's own draws, keyed by (row, position).
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from reanchor_jax.cache import Committed, KVCache, gather, init_cache, write
from reanchor_jax.config import CACHE_CHUNK, DecodeConfig, check_pair
from reanchor_jax.decoding.attach import make_paths
from reanchor_jax.decoding.draft import Draft, draft_blocks
from reanchor_jax.decoding.retain import Retained, init_retained, retain
from reanchor_jax.decoding.sampling import Choice, Sampling, choose, make_sampling, position_noise, row_keys
from reanchor_jax.decoding.trie import merge
from reanchor_jax.decoding.verify import first_nodes, prompt_mask, verify
from reanchor_jax.decoding.walk import RUNNING, cut, walk
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.statistics import Emitted, StepInfo

FINISH_REASONS = ("running", "stop", "length")  # names of the codes in Generation.finish_reasons
_STOP_SLOTS = 8  # stop ids are padded to a multiple of this, so that another number of them seldom recompiles
_OUTPUT_SLOTS = 64  # output buffers are a multiple of this: 40 values of max_new_tokens share one compilation


class DecodeState(NamedTuple):
    """What the next round needs of every row.

    lengths: committed tokens: those whose keys and values are in the caches.
    anchors: newest known token; its position is the length, and it is in no cache yet.
    remaining: tokens the row may still emit.
    finish: 0 running, 1 ended at a stop token, 2 at its budget.
    keys: row keys; a token's noise is folded from its row's key and its position.
    sampling: how the rows draw.
    stop_token_ids: ids that end a row; unused entries hold -1.
    target_cache, drafter_cache: committed keys and values per layer; the drafter's is empty without one.
    retained: rejected states of the previous round.
    """

    lengths: Int[Array, " B"]
    anchors: Int[Array, " B"]
    remaining: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: Key[Array, " B"]
    sampling: Sampling
    stop_token_ids: Int[Array, " Z"]
    target_cache: KVCache
    drafter_cache: KVCache
    retained: Retained


class Generation(NamedTuple):
    """A finished batch.

    tokens: emitted tokens, the prefill's first; past a row's length they hold 0.
    lengths: tokens emitted, stop token included.
    log_probs: nats, the target's own; processed_log_probs: nats, after temperature and filters (0 at temperature 0).
    finish_reasons: 1 stop, 2 length; names in FINISH_REASONS.
    info: StepInfo of every round, stacked, [max_new_tokens B]; rounds that did not happen hold 0.
    num_rounds: rounds the batch took.
    """

    tokens: Int[Array, "B max_new_tokens"]
    lengths: Int[Array, " B"]
    log_probs: Float[Array, "B max_new_tokens"]
    processed_log_probs: Float[Array, "B max_new_tokens"]
    finish_reasons: Int[Array, " B"]
    info: StepInfo
    num_rounds: Int[Array, ""]


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
) -> Generation:
    """Generate until every row has met a stop token or its budget; one compiled `lax.while_loop`.

    prompts: right-padded. key: one, or one per row. sampling: None is greedy.
    max_new_tokens: most tokens a row emits, prefill token included. budgets: a smaller limit per row.
    Equals `autoregress` with the same key token for token (float32), whatever the drafter and config.
    Raises ValueError for bad shapes and, outside a trace, bad values. Runs inside a caller's `jit`, `scan` and `vmap` too.
    """
    budgets = _check_request(models, prompts, prompt_lengths, config, max_new_tokens, budgets)
    num_rows = prompts.shape[0]
    sampling = make_sampling(num_rows) if sampling is None else sampling
    stops = _pad_stops(stop_token_ids, models.target.config.vocab_size)
    if not _is_traced(prompts):
        # one prompt buffer length for every prompt: the number of prefill passes follows the real lengths
        padding = _round_up(config.cache_length, config.prefill_chunk) - prompts.shape[1]
        prompts = jnp.pad(jnp.asarray(prompts, jnp.int32), ((0, 0), (0, max(padding, 0))))
    buffer_length = _round_up(max_new_tokens, _OUTPUT_SLOTS)
    result = _generate(
        models,
        jnp.asarray(prompts, jnp.int32),
        jnp.asarray(prompt_lengths, jnp.int32),
        row_keys(key, num_rows),
        sampling,
        stops,
        budgets,
        config=config,
        buffer_length=buffer_length,
    )
    return result._replace(
        tokens=result.tokens[:, :max_new_tokens],
        log_probs=result.log_probs[:, :max_new_tokens],
        processed_log_probs=result.processed_log_probs[:, :max_new_tokens],
        info=jax.tree.map(lambda x: x[:max_new_tokens], result.info),
    )


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
) -> tuple[DecodeState, Emitted]:
    """Read the prompts in chunks, fill both caches, and emit each row's first token (one a row, in Emitted.tokens[:, 0]).

    Arguments as `generate`'s. Unjitted; the caller jits it.
    """
    budgets = _check_request(models, prompts, prompt_lengths, config, max_new_tokens, budgets)
    num_rows = prompts.shape[0]
    return _prefill(
        models,
        jnp.asarray(prompts, jnp.int32),
        jnp.asarray(prompt_lengths, jnp.int32),
        row_keys(key, num_rows),
        make_sampling(num_rows) if sampling is None else sampling,
        _pad_stops(stop_token_ids, models.target.config.vocab_size),
        budgets,
        config=_resolve(models, config),
    )


def step(models: Models, state: DecodeState, *, config: DecodeConfig) -> tuple[DecodeState, StepInfo]:
    """Run one round for every row: draft, attach, merge, verify, walk, commit, retain. Unjitted; the caller jits and donates.

    Finished rows stay as they are and emit nothing. The new tokens stand in info.emitted.
    """
    state, emitted, info = _round(models, state, _resolve(models, config))
    return state, info._replace(emitted=emitted)


@partial(jax.jit, static_argnames=("config", "buffer_length"))
def _generate(models, prompts, prompt_lengths, keys, sampling, stops, budgets, *, config, buffer_length) -> Generation:
    config = _resolve(models, config)
    num_rows = prompts.shape[0]
    state, first = _prefill(models, prompts, prompt_lengths, keys, sampling, stops, budgets, config=config)
    num_places = _num_places(models.drafter, config)
    info = _empty_info(num_rows)
    # a round writes P entries at once, so the buffer has room for P beyond the last token
    blank = jnp.zeros((num_rows, buffer_length + num_places), jnp.float32)
    outputs = _Outputs(
        emitted=Emitted(
            tokens=blank.astype(jnp.int32),
            log_probs=blank,
            processed_log_probs=blank,
            num_emitted=jnp.zeros((num_rows,), jnp.int32),
        ),
        info=jax.tree.map(lambda x: jnp.zeros((buffer_length, *x.shape), x.dtype), info),
        num_rounds=jnp.int32(0),
    )
    outputs = outputs._replace(emitted=_append(outputs.emitted, first))

    def advance(carry):
        state, outputs = carry
        state, emitted, info = _round(models, state, config)
        stacked = jax.tree.map(
            lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, outputs.num_rounds, 0),
            outputs.info,
            info,
        )
        return state, _Outputs(emitted=_append(outputs.emitted, emitted), info=stacked, num_rounds=outputs.num_rounds + 1)

    state, outputs = jax.lax.while_loop(lambda carry: jnp.any(carry[0].finish == RUNNING), advance, (state, outputs))
    emitted = outputs.emitted
    is_real = jnp.arange(buffer_length) < emitted.num_emitted[:, None]

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


def _prefill(models, prompts, prompt_lengths, keys, sampling, stops, budgets, *, config) -> tuple[DecodeState, Emitted]:
    target, drafter = models
    num_rows, prompt_size = prompts.shape
    chunk = config.prefill_chunk
    prompts = jnp.pad(prompts, ((0, 0), (0, _round_up(prompt_size, chunk) - prompt_size)))
    dtype = target.embedding.embedding[...].dtype
    num_slots = _num_slots(drafter, config)
    drafter = drafter if config.is_speculative else None
    taps = drafter.config.target_layer_ids if drafter else ()
    target_cache = init_cache(target.config.layers, num_rows=num_rows, num_slots=num_slots, dtype=dtype)
    drafter_cache = ()
    if drafter is not None:
        drafter_cache = init_cache(drafter.config.layers, num_rows=num_rows, num_slots=num_slots, dtype=dtype)

    def read_chunk(index, carry):
        target_cache, drafter_cache, last_states = carry
        starts = jnp.full((num_rows,), index * chunk, jnp.int32)
        tokens = jax.lax.dynamic_slice(prompts, (0, index * chunk), (num_rows, chunk))
        positions = starts[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        output = target(
            tokens, positions, prompt_mask(chunk), committed=Committed(layers=target_cache, lengths=starts), target_layer_ids=taps
        )
        target_cache = write(target_cache, output.keys_values, starts)
        if drafter is not None:
            features = drafter.features(output.taps)
            drafter_cache = write(drafter_cache, drafter.context_keys_values(features, positions), starts)
        is_last = positions == prompt_lengths[:, None] - 1
        found = jnp.take_along_axis(output.states, jnp.argmax(is_last, axis=1)[:, None, None], axis=1)[:, 0]
        return target_cache, drafter_cache, jnp.where(jnp.any(is_last, axis=1)[:, None], found, last_states)

    num_chunks = (jnp.max(prompt_lengths) + chunk - 1) // chunk
    last_states = jnp.zeros((num_rows, target.config.width), dtype)
    target_cache, drafter_cache, last_states = jax.lax.fori_loop(0, num_chunks, read_chunk, (target_cache, drafter_cache, last_states))
    noise = _noise(keys, prompt_lengths, sampling, num_places=1, vocab_size=target.config.vocab_size)
    first = choose(target.logits(last_states[:, None]), sampling, noise, jnp.zeros((num_rows, 1), jnp.int32))
    num_emitted, finish = cut(
        first.tokens,
        jnp.ones((num_rows,), jnp.int32),
        stop_token_ids=stops,
        remaining=budgets,
        finish=jnp.full((num_rows,), RUNNING, jnp.int32),
    )
    state = DecodeState(
        lengths=prompt_lengths,
        anchors=first.tokens[:, 0],
        remaining=budgets - num_emitted,
        finish=finish,
        keys=keys,
        sampling=sampling,
        stop_token_ids=stops,
        target_cache=target_cache,
        drafter_cache=drafter_cache,
        retained=init_retained(num_rows, max_offsets=config.max_offsets, width=target.config.width, dtype=dtype),
    )
    return state, _emitted(first, num_emitted)


def _round(models: Models, state: DecodeState, config: DecodeConfig) -> tuple[DecodeState, Emitted, StepInfo]:
    if not config.is_speculative:
        return _plain_round(models.target, state)
    return _speculative_round(models.target, _drafter(models), state, config)


def _speculative_round(target: Target, drafter: Drafter, state: DecodeState, config: DecodeConfig) -> tuple[DecodeState, Emitted, StepInfo]:
    num_places = _num_places(drafter, config)
    is_running = state.finish == RUNNING
    # a finished row drafts nothing, so it does not hold the batch in a larger bucket
    retained = state.retained._replace(counts=jnp.where(is_running, state.retained.counts, 0))
    noise = _noise(state.keys, state.lengths + 1, state.sampling, num_places=num_places, vocab_size=target.config.vocab_size)

    def draft(num_blocks: int) -> Draft:
        drafted = draft_blocks(
            target,
            drafter,
            state.anchors,
            Committed(layers=state.drafter_cache, lengths=state.lengths),
            retained,
            state.keys,
            state.sampling,
            noise,
            num_blocks=num_blocks,
            draft_choice=config.draft_choice,
        )
        missing = 1 + config.max_offsets - num_blocks
        return Draft(
            tokens=jnp.pad(drafted.tokens, ((0, 0), (0, missing), (0, 0))),
            sites=jnp.pad(drafted.sites, ((0, 0), (0, missing)), constant_values=-1),
        )

    drafted = _smallest(config.block_buckets, 1 + jnp.max(retained.counts), draft)
    trie = merge(make_paths(drafted.tokens, drafted.sites), num_nodes=config.num_nodes)
    num_nodes = jnp.where(is_running, jnp.sum(trie.is_node, axis=1, dtype=jnp.int32), 0)

    def verify_and_walk(size: int):
        cut_trie = first_nodes(trie, size)
        verified = verify(target, drafter, cut_trie, Committed(layers=state.target_cache, lengths=state.lengths), state.sampling, noise)
        walked = walk(
            cut_trie,
            verified.choice.tokens,
            num_places=num_places,
            stop_token_ids=state.stop_token_ids,
            remaining=state.remaining,
            finish=state.finish,
        )
        choice = jax.tree.map(lambda x: jnp.take_along_axis(x, walked.nodes, axis=1), verified.choice)
        # the next anchor is the target's token at the last node whose token was emitted
        last = jnp.maximum(walked.num_emitted - 1, 0)
        last_node = jnp.take_along_axis(walked.nodes, last[:, None], axis=1)[:, 0]
        kept = retained
        if config.retain != "none":
            kept = retain(
                cut_trie,
                verified.choice.tokens,
                verified.features,
                last_node,
                policy=config.retain,
                max_offsets=config.max_offsets,
            )
        features = jnp.take_along_axis(verified.features, walked.nodes[:, :, None], axis=1)
        is_shifted = jnp.take_along_axis(cut_trie.paths, last_node[:, None], axis=1)[:, 0] > 0
        return walked, choice, gather(verified.keys_values, walked.nodes), features, kept, is_shifted

    walked, choice, keys_values, features, kept, is_shifted = _smallest(config.node_buckets, jnp.max(num_nodes), verify_and_walk)
    # P entries are written whatever was accepted: those past the new length are garbage that the next write covers
    positions = state.lengths[:, None] + jnp.arange(num_places, dtype=jnp.int32)
    new_state = state._replace(
        lengths=state.lengths + walked.num_emitted,
        anchors=_next_anchor(choice, walked.num_emitted, state.anchors),
        remaining=state.remaining - walked.num_emitted,
        finish=walked.finish,
        target_cache=write(state.target_cache, keys_values, state.lengths),
        drafter_cache=write(state.drafter_cache, drafter.context_keys_values(features, positions), state.lengths),
        retained=kept,
    )
    num_walked = jnp.sum(walked.nodes > 0, axis=1, dtype=jnp.int32)
    return (
        new_state,
        _emitted(choice, walked.num_emitted),
        StepInfo(
            emitted=None,
            num_emitted=walked.num_emitted,
            num_accepted=jnp.where(is_running, num_walked, 0),
            num_nodes=num_nodes,
            num_offsets=retained.counts,
            num_attached=jnp.where(is_running, jnp.sum(drafted.sites[:, 1:] >= 0, axis=1, dtype=jnp.int32), 0),
            num_dropped=jnp.where(is_running, trie.num_dropped, 0),
            is_shifted=is_shifted & is_running,
        ),
    )


def _plain_round(target: Target, state: DecodeState) -> tuple[DecodeState, Emitted, StepInfo]:
    num_rows = state.lengths.shape[0]
    noise = _noise(state.keys, state.lengths + 1, state.sampling, num_places=1, vocab_size=target.config.vocab_size)
    output = target(
        state.anchors[:, None],
        state.lengths[:, None],
        prompt_mask(1),
        committed=Committed(layers=state.target_cache, lengths=state.lengths),
    )
    choice = choose(target.logits(output.states), state.sampling, noise, jnp.zeros((num_rows, 1), jnp.int32))
    num_emitted, finish = cut(
        choice.tokens,
        jnp.ones((num_rows,), jnp.int32),
        stop_token_ids=state.stop_token_ids,
        remaining=state.remaining,
        finish=state.finish,
    )
    # a finished row writes zeros; that the write waits for the choice also tells XLA that every read came before it: no copy of a cache
    keys_values = tuple(jnp.where(num_emitted[:, None, None, None] > 0, entries, 0) for entries in output.keys_values)
    new_state = state._replace(
        lengths=state.lengths + num_emitted,
        anchors=_next_anchor(choice, num_emitted, state.anchors),
        remaining=state.remaining - num_emitted,
        finish=finish,
        target_cache=write(state.target_cache, keys_values, state.lengths),
    )
    info = _empty_info(num_rows)
    return new_state, _emitted(choice, num_emitted), info._replace(num_emitted=num_emitted, num_nodes=num_emitted)


def _smallest(buckets: tuple[int, ...], needed: Int[Array, ""], branch):
    """Run branch(size) for the smallest bucket that holds `needed`, picked on the device."""
    if len(buckets) == 1:
        return branch(buckets[0])
    index = jnp.sum(needed > jnp.asarray(buckets[:-1], jnp.int32), dtype=jnp.int32)
    return jax.lax.switch(index, [partial(branch, size) for size in buckets])


def _noise(keys, positions, sampling: Sampling, *, num_places: int, vocab_size: int) -> Float[Array, "B P V"]:
    """Noise of num_places positions from the given ones on; zeros, uncomputed, if no row samples."""
    places = positions[:, None] + jnp.arange(num_places, dtype=jnp.int32)
    return jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: position_noise(keys, places, vocab_size=vocab_size),
        lambda: jnp.zeros((*places.shape, vocab_size), jnp.float32),
    )


def _next_anchor(choice: Choice, num_emitted: Int[Array, " B"], anchors: Int[Array, " B"]) -> Int[Array, " B"]:
    last = jnp.take_along_axis(choice.tokens, jnp.maximum(num_emitted - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(num_emitted > 0, last, anchors)


def _emitted(choice: Choice, num_emitted: Int[Array, " B"]) -> Emitted:
    return Emitted(
        tokens=choice.tokens,
        log_probs=choice.log_probs,
        processed_log_probs=choice.processed_log_probs,
        num_emitted=num_emitted,
    )


def _append(buffers: Emitted, new: Emitted) -> Emitted:
    """Write a round's tokens behind those of the rounds before; what lies past num_emitted is overwritten by the next."""

    def write_row(buffer, values, start):
        return jax.lax.dynamic_update_slice(buffer, values, (start,))

    written = {
        name: jax.vmap(write_row)(getattr(buffers, name), getattr(new, name), buffers.num_emitted)
        for name in ("tokens", "log_probs", "processed_log_probs")
    }
    return Emitted(**written, num_emitted=buffers.num_emitted + new.num_emitted)


def _empty_info(num_rows: int) -> StepInfo:
    zero = jnp.zeros((num_rows,), jnp.int32)
    return StepInfo(
        emitted=None,
        num_emitted=zero,
        num_accepted=zero,
        num_nodes=zero,
        num_offsets=zero,
        num_attached=zero,
        num_dropped=zero,
        is_shifted=jnp.zeros((num_rows,), bool),
    )


def _resolve(models: Models, config: DecodeConfig) -> DecodeConfig:
    return config.resolve(_drafter(models).config.block_size) if config.is_speculative else config


def _drafter(models: Models) -> Drafter:
    if models.drafter is None:
        raise ValueError("this config drafts, but models.drafter is None; load a pair or use DecodeConfig.autoregressive().")
    return models.drafter


def _num_places(drafter: Drafter | None, config: DecodeConfig) -> int:
    """P: nodes on the longest path of a trie, anchor included; a shifted block attached at the baseline's last slot."""
    if drafter is None or not config.is_speculative:
        return 1
    block_size = drafter.config.block_size
    return 2 * block_size - 1 if config.max_offsets else block_size


def _num_slots(drafter: Drafter | None, config: DecodeConfig) -> int:
    """Cache slots: every position a row may hold, and room for the P entries the last round writes."""
    return _round_up(
        max(config.cache_length + _num_places(drafter, config), _round_up(config.cache_length, config.prefill_chunk)), CACHE_CHUNK
    )


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


def _is_traced(x) -> bool:
    return isinstance(x, Tracer)


def _check_request(models: Models, prompts, prompt_lengths, config: DecodeConfig, max_new_tokens: int, budgets) -> Int[Array, " B"]:
    """Check everything that can be known on the host; return the rows' budgets."""
    target = models.target.config
    if config.is_speculative:
        check_pair(target, _drafter(models).config)
        _resolve(models, config)
    if config.cache_length > target.max_positions:
        raise ValueError(
            f"cache_length ({config.cache_length}) exceeds the {target.max_positions} positions the target was made for; lower it."
        )
    if not isinstance(max_new_tokens, (int, np.integer)) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1; got {max_new_tokens!r}.")
    if jnp.ndim(prompts) != 2 or 0 in jnp.shape(prompts):
        raise ValueError(f"prompts must be [rows, tokens] with at least one of each; got shape {jnp.shape(prompts)}.")
    num_rows, prompt_size = jnp.shape(prompts)
    for name, value in (("prompt_lengths", prompt_lengths), ("budgets", budgets)):
        if value is not None and jnp.shape(value) != (num_rows,):
            raise ValueError(f"{name} must hold one number per row ({num_rows}); got shape {jnp.shape(value)}.")
    limit = jnp.full((num_rows,), max_new_tokens, jnp.int32)
    limit = limit if budgets is None else jnp.minimum(jnp.asarray(budgets, jnp.int32), limit)
    if any(map(_is_traced, (prompts, prompt_lengths, budgets))):
        _check_room(prompt_size, max_new_tokens, config)
        return limit
    tokens, lengths, new = np.asarray(prompts), np.asarray(prompt_lengths), np.asarray(limit)
    if tokens.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        raise ValueError(f"prompts and prompt_lengths must hold integers; got {tokens.dtype} and {lengths.dtype}.")
    if lengths.min() < 1 or lengths.max() > prompt_size:
        raise ValueError(f"prompt_lengths must lie in 1..{prompt_size}; got {lengths.tolist()}; a prompt needs at least one token.")
    if new.min() < 1:
        raise ValueError(f"budgets must be at least 1 token a row; got {new.tolist()}.")
    longest = int(np.argmax(lengths + new))
    _check_room(int(lengths[longest]), int(new[longest]), config)
    is_real = np.arange(prompt_size) < lengths[:, None]
    wrong = tokens[is_real & ((tokens < 0) | (tokens >= target.vocab_size))]
    if wrong.size:
        raise ValueError(f"prompts hold token id {wrong[0]}, outside the target's vocabulary 0..{target.vocab_size - 1}.")
    return limit


def _check_room(prompt_size: int, num_new: int, config: DecodeConfig) -> None:
    if prompt_size + num_new > config.cache_length:
        raise ValueError(
            f"prompt ({prompt_size}) + max_new_tokens ({num_new}) exceed cache_length ({config.cache_length}); "
            f"raise cache_length to {prompt_size + num_new}."
        )


def _pad_stops(stop_token_ids, vocab_size: int) -> Int[Array, " Z"]:
    if _is_traced(stop_token_ids):
        return stop_token_ids.astype(jnp.int32)
    ids = np.asarray(stop_token_ids, np.int64).reshape(-1)
    wrong = ids[(ids < -1) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"stop_token_ids holds {wrong[0]}, outside the target's vocabulary 0..{vocab_size - 1}.")
    padded = np.full((max(_round_up(ids.size, _STOP_SLOTS), _STOP_SLOTS),), -1, np.int32)
    padded[: ids.size] = ids
    return jnp.asarray(padded)
