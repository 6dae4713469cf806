"""One round: draft, attach, merge, verify, walk, commit, retain; or plain target tokens.

In: models and a DecodeState.
Out: the next DecodeState, what the round emitted, and what it did.
Source: ReAnchor section 3; whatever is drafted, the emitted tokens are the target's own draws, keyed by (row, position).
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from reanchor_jax.cache import Committed, gather, write
from reanchor_jax.decoding.config import Arm, DecodeConfig, Schedule
from reanchor_jax.decoding.propose import Proposal, propose
from reanchor_jax.decoding.retain import Retained, retain
from reanchor_jax.decoding.sampling import Bans, Choice, Sampling, banned, choose, position_noise
from reanchor_jax.decoding.schedule import count, pick_arm, promised_drafts
from reanchor_jax.decoding.state import DecodeState, num_places, require_drafter
from reanchor_jax.decoding.verify import first_nodes, prompt_mask, verify
from reanchor_jax.decoding.walk import RUNNING, cut, walk
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.statistics import Emitted, StepInfo, Trace


class _Verdict(NamedTuple):
    """What the target made of a proposal, and what a commit writes of it.

    num_emitted, finish: after stops and budgets. choice: the target's tokens along the path, [B P].
    keys_values, context_keys_values: target and drafter entries of the path, for positions from the row's length on.
    retained: states for the next round. info: of the round.
    """

    num_emitted: Int[Array, " B"]
    finish: Int[Array, " B"]
    choice: Choice
    keys_values: tuple[Float[Array, "B 2G P A"], ...]
    context_keys_values: tuple[Float[Array, "B 2G P A"], ...]
    retained: Retained
    info: StepInfo


def run_round(models: Models, state: DecodeState, config: DecodeConfig) -> tuple[DecodeState, Emitted, StepInfo]:
    """Run one round for every row; config is resolved. The info's `emitted` is None: what was emitted is returned beside it."""
    if not config.is_speculative:
        return _plain_round(models.target, state)
    target, drafter = models.target, require_drafter(models)
    if config.schedule is None:
        return _commit(state, _judge(target, drafter, state, config))
    return _scheduled_round(target, drafter, state, config.schedule, config)


@jax.named_scope("noise")
def noise_ahead(
    keys: Key[Array, " B"], positions: Int[Array, " B"], sampling: Sampling, *, num_places: int, vocab_size: int
) -> Float[Array, "B P V"]:
    """Noise of num_places positions from the given ones on; zeros, uncomputed, if no row samples."""
    places = positions[:, None] + jnp.arange(num_places, dtype=jnp.int32)[None, :]
    return jax.lax.cond(
        jnp.any(sampling.temperature > 0),
        lambda: position_noise(keys, places, vocab_size=vocab_size),
        lambda: jnp.zeros((*places.shape, vocab_size), jnp.float32),
    )


def emitted_tokens(choice: Choice, num_emitted: Int[Array, " B"]) -> Emitted:
    """The choices of a path as what a pass emitted."""
    return Emitted(
        tokens=choice.tokens,
        log_probs=choice.log_probs,
        processed_log_probs=choice.processed_log_probs,
        num_emitted=num_emitted,
    )


def empty_emitted(num_rows: int, size: int) -> Emitted:
    """Room for the tokens of rows that have emitted none yet."""
    blank = jnp.zeros((num_rows, size), jnp.float32)
    return Emitted(
        tokens=blank.astype(jnp.int32),
        log_probs=blank,
        processed_log_probs=blank,
        num_emitted=jnp.zeros((num_rows,), jnp.int32),
    )


def empty_trace(num_rows: int, config: DecodeConfig, block_size: int) -> Trace | None:
    """The trace of a round that did nothing, if the config asks for traces; config is resolved."""
    if not config.has_trace:
        return None
    blocks = jnp.zeros((num_rows, 1 + config.max_offsets), jnp.int32)
    nodes = jnp.zeros((num_rows, config.num_nodes), jnp.int32)
    return Trace(
        block_tokens=jnp.zeros((*blocks.shape, block_size), jnp.int32),
        offsets=blocks,
        is_block=blocks > 0,
        node_tokens=nodes,
        parents=nodes,
        depths=nodes,
        blocks=nodes,
        is_node=nodes > 0,
        target_tokens=nodes,
    )


def empty_info(num_rows: int) -> StepInfo:
    """The info of a round that did nothing."""
    zero = jnp.zeros((num_rows,), jnp.int32)
    return StepInfo(
        emitted=None,
        num_emitted=zero,
        num_accepted=zero,
        num_nodes=zero,
        num_offsets=zero,
        num_attached=zero,
        num_dropped=zero,
        num_plain=zero,
        is_shifted=jnp.zeros((num_rows,), bool),
    )


def _judge(target: Target, drafter: Drafter, state: DecodeState, config: DecodeConfig) -> _Verdict:
    """Propose, verify and walk."""
    places = num_places(drafter, config)
    is_running = state.finish == RUNNING
    # a finished row drafts nothing, so it does not hold the batch in a larger bucket
    retained = state.retained._replace(counts=jnp.where(is_running, state.retained.counts, 0))
    noise = noise_ahead(state.keys, state.lengths + 1, state.sampling, num_places=places, vocab_size=target.config.vocab_size)

    proposal = _smallest(
        config.block_buckets,
        1 + jnp.max(retained.counts),
        lambda num_blocks: propose(target, drafter, state, retained, noise, is_running=is_running, num_blocks=num_blocks, config=config),
    )
    trie = proposal.trie
    num_nodes = jnp.where(is_running, jnp.sum(trie.is_node, axis=1, dtype=jnp.int32), 0)

    def verify_and_walk(size: int):
        cut_trie = first_nodes(trie, size)
        committed = Committed(layers=state.target_cache, lengths=state.lengths)
        is_banned = banned(state.bans, state.stop_token_ids, cut_trie.depths, vocab_size=target.config.vocab_size)
        verified = verify(target, drafter, cut_trie, committed, state.sampling, noise, is_banned)
        walked = walk(
            cut_trie,
            verified.choice.tokens,
            num_places=places,
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
        is_shifted = jnp.take_along_axis(cut_trie.blocks, last_node[:, None], axis=1)[:, 0] > 0
        target_tokens = jnp.pad(verified.choice.tokens, ((0, 0), (0, config.num_nodes - size))) if config.has_trace else None
        return walked, choice, gather(verified.keys_values, walked.nodes), features, kept, is_shifted, target_tokens

    walked, choice, keys_values, features, kept, is_shifted, target_tokens = _smallest(
        config.node_buckets, jnp.max(num_nodes), verify_and_walk
    )
    positions = state.lengths[:, None] + jnp.arange(places, dtype=jnp.int32)[None, :]
    num_walked = jnp.sum(walked.nodes > 0, axis=1, dtype=jnp.int32)
    return _Verdict(
        num_emitted=walked.num_emitted,
        finish=walked.finish,
        choice=choice,
        keys_values=keys_values,
        context_keys_values=drafter.context_keys_values(features, positions),
        retained=kept,
        info=StepInfo(
            emitted=None,
            num_emitted=walked.num_emitted,
            num_accepted=jnp.where(is_running, num_walked, 0),
            num_nodes=num_nodes,
            num_offsets=jnp.minimum(retained.counts, config.block_buckets[-1] - 1),  # an arm of a schedule may draft fewer
            num_attached=jnp.where(is_running, proposal.num_attached, 0),
            num_dropped=jnp.where(is_running, trie.num_dropped, 0),
            num_plain=jnp.zeros_like(walked.num_emitted),
            is_shifted=is_shifted & is_running,
            trace=_trace(proposal, retained, target_tokens, is_running),
        ),
    )


@jax.named_scope("commit")
def _commit(state: DecodeState, verdict: _Verdict) -> tuple[DecodeState, Emitted, StepInfo]:
    """Write what was accepted into the caches."""
    # P entries are written whatever was accepted: those past the new length are garbage that the next write covers
    new_state = state._replace(
        lengths=state.lengths + verdict.num_emitted,
        anchors=_next_anchor(verdict.choice, verdict.num_emitted, state.anchors),
        remaining=state.remaining - verdict.num_emitted,
        bans=_pay(state.bans, verdict.num_emitted),
        finish=verdict.finish,
        target_cache=write(state.target_cache, verdict.keys_values, state.lengths),
        drafter_cache=write(state.drafter_cache, verdict.context_keys_values, state.lengths),
        retained=verdict.retained,
    )
    return new_state, emitted_tokens(verdict.choice, verdict.num_emitted), verdict.info


def _trace(proposal: Proposal, retained: Retained, target_tokens: Int[Array, "B N"] | None, is_running: Bool[Array, " B"]) -> Trace | None:
    """The trace of a round whose proposal and target tokens were kept for it."""
    if proposal.block_tokens is None or target_tokens is None:
        return None
    trie = proposal.trie
    is_block = jnp.arange(proposal.block_tokens.shape[1], dtype=jnp.int32)[None, :] <= retained.counts[:, None]
    trace = Trace(
        block_tokens=jnp.where(is_block[..., None], proposal.block_tokens, 0),
        offsets=jnp.where(is_block, jnp.pad(retained.offsets, ((0, 0), (1, 0))), 0),
        is_block=is_block,
        node_tokens=trie.tokens,
        parents=trie.parents,
        depths=trie.depths,
        blocks=trie.blocks,
        is_node=trie.is_node,
        target_tokens=jnp.where(trie.is_node, target_tokens, 0),
    )
    return jax.tree.map(lambda x: jnp.where(is_running.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype)), trace)


def _scheduled_round(
    target: Target, drafter: Drafter, state: DecodeState, schedule: Schedule, config: DecodeConfig
) -> tuple[DecodeState, Emitted, StepInfo]:
    """Run the round that the schedule picks; all rows run the same."""
    places = num_places(drafter, config)
    is_running = state.finish == RUNNING
    arm = pick_arm(
        schedule,
        state.acceptance,
        temperature=state.sampling.temperature,
        lengths=state.lengths,
        remaining=state.remaining,
        num_retained=state.retained.counts,
        num_unread=state.lengths - state.backlog.num_read,
        num_places=places,
        is_running=is_running,
    )
    is_drafting = jnp.asarray([arm.num_blocks > 0 for arm in schedule.arms])[arm]
    # the loops stand before the switch, and what its branches return is written after it: around a cache that is written inside a branch,
    # some versions of XLA put copies
    state, plain = _plain_stretch(target, state, ~is_drafting, num_places=places)
    state = _read_backlog(target, drafter, state, is_drafting, num_places=places)

    def drafting(arm: Arm):
        sizes = {"num_nodes": arm.num_nodes, "block_buckets": (arm.num_blocks,), "node_buckets": (arm.num_nodes,)}
        chain = {"expand": "none", "reliability": 1.0, "num_ranks": 0} if arm.is_chain else {}
        return partial(_judge, target, drafter, config=replace(config, schedule=None, **sizes, **chain))

    def nothing(state: DecodeState) -> _Verdict:
        verdict = jax.eval_shape(next(drafting(arm) for arm in schedule.arms if arm.num_blocks), state)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), verdict)._replace(finish=state.finish)

    verdict = jax.lax.switch(arm, [drafting(arm) if arm.num_blocks else nothing for arm in schedule.arms], state)
    new_state, drafted, info = _commit(state, verdict)
    num_plain = plain.num_emitted
    acceptance = count(
        state.acceptance,
        num_accepted=info.num_accepted,
        promised=promised_drafts(schedule, state.sampling.temperature)[:, arm],
        num_plain=num_plain,
        is_running=is_running,
    )
    num_read = jnp.where(is_drafting, new_state.lengths, state.backlog.num_read)
    return (
        new_state._replace(acceptance=acceptance, backlog=state.backlog._replace(num_read=num_read)),
        jax.tree.map(lambda mine, other: jnp.where(is_drafting, mine, other), drafted, plain),
        info._replace(num_emitted=info.num_emitted + num_plain, num_nodes=info.num_nodes + num_plain, num_plain=num_plain),
    )


def _read_backlog(target: Target, drafter: Drafter, state: DecodeState, is_drafting: Bool[Array, ""], *, num_places: int) -> DecodeState:
    """If the round drafts, run the target again over what was decoded plainly, num_places tokens a pass, for the drafter's context."""
    steps = jnp.arange(num_places, dtype=jnp.int32)[None, :]

    is_running = state.finish == RUNNING  # what a finished row has not read, nobody will ask for

    def is_left(carry):
        return is_drafting & jnp.any(is_running & (carry[1] < state.lengths))

    def read(carry):
        drafter_cache, starts = carry
        positions = starts[:, None] + steps
        output = target(
            jnp.take_along_axis(state.backlog.tokens, positions, axis=1),
            positions,
            prompt_mask(num_places),
            committed=Committed(layers=state.target_cache, lengths=starts),
            target_layer_ids=drafter.config.target_layer_ids,
        )
        keys_values = drafter.context_keys_values(drafter.features(output.taps), positions)
        # what is read past a row's length is garbage behind its context, and written over with it
        return write(drafter_cache, keys_values, starts), jnp.minimum(starts + num_places, state.lengths)

    drafter_cache, num_read = jax.lax.while_loop(is_left, read, (state.drafter_cache, state.backlog.num_read))
    return state._replace(drafter_cache=drafter_cache, backlog=state.backlog._replace(num_read=num_read))


def _plain_stretch(target: Target, state: DecodeState, is_plain: Bool[Array, ""], *, num_places: int) -> tuple[DecodeState, Emitted]:
    """If the round does not draft, decode up to num_places tokens one by one, and leave them to be read by the drafter when it is asked."""

    def is_left(carry):
        index, state, _ = carry
        return is_plain & (index < num_places) & jnp.any(state.finish == RUNNING)

    def advance(carry):
        index, state, emitted = carry
        state, new, _ = _plain_round(target, state)
        # a row that runs has run in every pass of this round, so its token belongs at the same index
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=1)
        return index + 1, state, Emitted(*map(put, emitted[:-1], new[:-1]), num_emitted=emitted.num_emitted + new.num_emitted)

    start = (jnp.int32(0), state, empty_emitted(state.lengths.shape[0], num_places))
    _, new_state, emitted = jax.lax.while_loop(is_left, advance, start)
    # in a round that drafts, this writes behind the length, where nobody reads: the drafter will have read what is committed there
    committed = jnp.concatenate([state.anchors[:, None], emitted.tokens[:, :-1]], axis=1)
    tokens = jax.vmap(jax.lax.dynamic_update_slice)(state.backlog.tokens, committed, state.lengths[:, None])
    return new_state._replace(backlog=state.backlog._replace(tokens=tokens)), emitted


def _plain_round(target: Target, state: DecodeState) -> tuple[DecodeState, Emitted, StepInfo]:
    num_rows = state.lengths.shape[0]
    noise = noise_ahead(state.keys, state.lengths + 1, state.sampling, num_places=1, vocab_size=target.config.vocab_size)
    output = target(
        state.anchors[:, None],
        state.lengths[:, None],
        prompt_mask(1),
        committed=Committed(layers=state.target_cache, lengths=state.lengths),
    )
    first = jnp.zeros((num_rows, 1), jnp.int32)
    is_banned = banned(state.bans, state.stop_token_ids, first, vocab_size=target.config.vocab_size)
    choice = choose(target.logits(output.states), state.sampling, noise, first, is_banned)
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
        bans=_pay(state.bans, num_emitted),
        finish=finish,
        target_cache=write(state.target_cache, keys_values, state.lengths),
    )
    info = empty_info(num_rows)._replace(num_emitted=num_emitted, num_nodes=num_emitted, num_plain=num_emitted)
    return new_state, emitted_tokens(choice, num_emitted), info


def _smallest(buckets: tuple[int, ...], needed: Int[Array, ""], branch):
    """Run branch(size) for the smallest bucket that holds `needed`, picked on the device."""
    if len(buckets) == 1:
        return branch(buckets[0])
    index = jnp.sum(needed > jnp.asarray(buckets[:-1], jnp.int32), dtype=jnp.int32)
    return jax.lax.switch(index, [partial(branch, size) for size in buckets])


def _pay(bans: Bans | None, num_emitted: Int[Array, " B"]) -> Bans | None:
    """The bans after a row has emitted tokens it owed."""
    return None if bans is None else bans._replace(num_owed=bans.num_owed - num_emitted)


def _next_anchor(choice: Choice, num_emitted: Int[Array, " B"], anchors: Int[Array, " B"]) -> Int[Array, " B"]:
    last = jnp.take_along_axis(choice.tokens, jnp.maximum(num_emitted - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(num_emitted > 0, last, anchors)
