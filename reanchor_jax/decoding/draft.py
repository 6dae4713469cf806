"""Draft the baseline block and all shifted blocks in one batched pass, and choose their tokens.

In: the anchor, the drafter's context cache, retained states.
Out: block tokens and the site where each shifted block attaches; or, for a tree, the likeliest tokens of every slot.
Source: ReAnchor Algorithm 1 (lines 1-14). Blocks never see each other; the committed context is shared, never copied per block.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from reanchor_jax.cache import Committed
from reanchor_jax.decoding.attach import Match, find_sites, random_scores
from reanchor_jax.decoding.confidence import above_threshold, confidences, worth_their_cost
from reanchor_jax.decoding.config import DecodeConfig, DraftChoice
from reanchor_jax.decoding.expand import Candidates
from reanchor_jax.decoding.retain import Retained
from reanchor_jax.decoding.sampling import Sampling, argmax, component_noise, draft_noise, filter_logits
from reanchor_jax.models.drafter import BlockContext, Drafter
from reanchor_jax.models.heads import GRUHead, LatentMixture, MarkovHead, RefinerHead
from reanchor_jax.models.target import Target


class Draft(NamedTuple):
    """Drafted blocks; block 0 is the baseline, block r + 1 is drafted from retained entry r.

    tokens: slot 0 is the block's anchor. Padding blocks hold 0.
    sites: baseline index where the block attaches; -1 for a block without one and for padding.
    kept: tokens of the block that are verified, anchor included; all K unless confidence cuts it, 0 without a site.
    """

    tokens: Int[Array, "B M K"]
    sites: Int[Array, "B M"]
    kept: Int[Array, "B M"]


@jax.named_scope("draft")
def draft_blocks(
    target: Target,
    drafter: Drafter,
    anchors: Int[Array, " B"],
    committed: Committed,
    retained: Retained,
    keys: Key[Array, " B"],
    sampling: Sampling,
    noise: Float[Array, "B P V"],
    *,
    is_running: Bool[Array, " B"],
    num_blocks: int,
    config: DecodeConfig,
) -> Draft:
    """Draft num_blocks blocks for every row: the baseline and one per retained entry.

    noise: the target's own noise for the tokens 1, 2, ... positions after the anchor; read only by the coupled choice.
    """
    num_shifted = num_blocks - 1
    given = (target, drafter, anchors, committed, retained, keys, sampling)
    drafted = _run(*given, num_blocks=num_blocks, config=config)
    block_anchors, offsets, is_block, states, logits = drafted
    pick = partial(_pick, lengths=committed.lengths, keys=keys, sampling=sampling, noise=noise, draft_choice=config.draft_choice)

    def choose(blocks, first_positions, first_block):
        chosen = _Blocks(*(part[:, blocks] for part in drafted))
        return _choose(target, drafter, chosen, first_positions, partial(pick, first_block=first_block))[0]

    baseline = choose(slice(0, 1), jnp.zeros_like(offsets[:, :1]), first_block=0)[:, 0]
    baseline = jnp.concatenate([anchors[:, None], baseline], axis=1)
    match = _match(drafter, logits, block_anchors, is_block, offsets, keys, committed.lengths, config)
    sites = find_sites(baseline, match, rule=config.attach, is_second_tried=config.is_second_tried)
    tokens = baseline[:, None]
    if num_shifted:
        # a continuation is drawn with the noise of the positions where it is attached, not of those where it was drafted
        shifted = choose(slice(1, None), jnp.maximum(sites[:, 1:], 0), first_block=1)
        shifted = jnp.concatenate([block_anchors[:, 1:, None], shifted], axis=2)
        shifted = jnp.where(is_block[:, 1:, None], shifted, 0)
        tokens = jnp.concatenate([tokens, shifted], axis=1)
    draft = Draft(tokens=tokens, sites=sites, kept=jnp.where(sites >= 0, tokens.shape[2], 0))
    return _cut(drafter, states, is_running, draft, config)


@jax.named_scope("draft")
def draft_candidates(
    target: Target,
    drafter: Drafter,
    anchors: Int[Array, " B"],
    committed: Committed,
    retained: Retained,
    keys: Key[Array, " B"],
    sampling: Sampling,
    noise: Float[Array, "B P V"],
    *,
    num_blocks: int,
    config: DecodeConfig,
) -> Candidates:
    """Draft as `draft_blocks`, and return the likeliest tokens of every slot in place of one.

    Their log-probabilities are the drafter's own, untempered; where tokens are sampled, filtered as the target's, with the noise (times the
    temperature) already in them if it is the draft's own. A causal head reads the block's own likeliest tokens so ranked.
    """
    blocks = _run(target, drafter, anchors, committed, retained, keys, sampling, num_blocks=num_blocks, config=config)
    logits = blocks.logits
    if drafter.causal_head is not None:
        is_coupled = config.draft_choice == "coupled"

        def pick(logits, first_positions):
            given = {"lengths": committed.lengths, "keys": keys, "sampling": sampling, "noise": noise, "first_block": 0}
            tokens = _pick(logits, first_positions, **given, draft_choice=config.draft_choice)
            if is_coupled:  # the target's noise belongs to places, and of a shifted block they are not known yet
                tokens = tokens.at[:, 1:].set(argmax(logits[:, 1:]))
            return tokens

        first_positions = jnp.zeros_like(blocks.offsets) if is_coupled else blocks.offsets
        logits = _choose(target, drafter, blocks, first_positions, pick)[1]
    logits = drafter.spread(logits).astype(jnp.float32)
    num_ranks = min(config.num_ranks or 16, logits.shape[-1])

    def likeliest(ranked, log_probs):
        _, tokens = jax.lax.top_k(ranked, num_ranks)
        return tokens, jnp.take_along_axis(log_probs, tokens, axis=-1)

    def greedy():
        return likeliest(logits, jax.nn.log_softmax(logits, axis=-1))

    def sample():
        rows, _, num_drafts, vocab_size = logits.shape
        temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None, None, None]
        # log q + T G ranks as (log q) / T + G does, and leaves the sums along a path as sure as the drafter is
        filtered = temperature * filter_logits(logits.reshape(rows, -1, vocab_size), sampling).reshape(logits.shape)
        distance = 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None, None, :]
        if config.draft_choice == "independent":
            positions = committed.lengths[:, None, None] + blocks.offsets[..., None] + distance
            ranked = filtered + temperature * draft_noise(keys, positions, first_block=0, vocab_size=vocab_size)
            scored = jax.nn.log_softmax(ranked, axis=-1)
        else:
            # the baseline's slots stand where they are drafted; where a shifted block will stand is not known yet
            ranked = filtered.at[:, 0].add(temperature[:, 0] * noise[:, :num_drafts])
            scored = jax.nn.log_softmax(filtered, axis=-1)
        is_sampled = sampling.temperature[:, None, None, None] > 0
        return likeliest(jnp.where(is_sampled, ranked, logits), jnp.where(is_sampled, scored, jax.nn.log_softmax(logits, axis=-1)))

    if config.draft_choice == "argmax":
        tokens, log_probs = greedy()
    else:
        tokens, log_probs = jax.lax.cond(jnp.any(sampling.temperature > 0), sample, greedy)
    return Candidates(tokens=tokens, log_probs=log_probs, anchors=blocks.anchors, is_block=blocks.is_block)


class _Blocks(NamedTuple):
    """A drafting pass: first token and offset of every block, states (of the component chosen) and base logits of its predicting slots."""

    anchors: Int[Array, "B M"]
    offsets: Int[Array, "B M"]
    is_block: Bool[Array, "B M"]
    states: Float[Array, "B M K1 D"]
    logits: Float[Array, "B M K1 V1"]


# tokens of one slot or of all, from their logits and the distance of the token before the first of them from the round's anchor
_Picker = Callable[[Float[Array, "B M k V"], Int[Array, "B M"]], Int[Array, "B M k"]]


def _run(
    target: Target,
    drafter: Drafter,
    anchors: Int[Array, " B"],
    committed: Committed,
    retained: Retained,
    keys: Key[Array, " B"],
    sampling: Sampling,
    *,
    num_blocks: int,
    config: DecodeConfig,
) -> _Blocks:
    """One batched pass over the baseline and num_blocks - 1 shifted blocks."""
    num_shifted = num_blocks - 1
    # what the bucket leaves out is padding in every row
    retained = Retained(
        tokens=retained.tokens[:, :num_shifted],
        offsets=retained.offsets[:, :num_shifted],
        features=retained.features[:, :num_shifted],
        visible=retained.visible[:, :num_shifted, :num_shifted],
        counts=retained.counts,
    )
    block_anchors = jnp.concatenate([anchors[:, None], retained.tokens], axis=1)
    offsets = jnp.concatenate([jnp.zeros_like(anchors)[:, None], retained.offsets], axis=1)
    is_block = jnp.arange(num_blocks, dtype=jnp.int32)[None, :] <= retained.counts[:, None]
    visible = jnp.pad(retained.visible, ((0, 0), (1, 0), (0, 0)))
    every_slot = _block_states(target, drafter, block_anchors, committed, offsets, visible, retained)
    states = drafter.predicting(every_slot)
    if drafter.latent_mixture is not None:
        noise = None
        if config.draft_choice == "independent":
            positions = committed.lengths[:, None] + offsets
            noise = component_noise(keys, positions, num_components=drafter.latent_mixture.config.num_components)
        states = _with_component(drafter.latent_mixture, states, every_slot[:, :, 0], sampling, noise)
    return _Blocks(anchors=block_anchors, offsets=offsets, is_block=is_block, states=states, logits=drafter.base_logits(target, states))


def _with_component(
    mixture: LatentMixture,
    states: Float[Array, "B M K1 D"],
    anchor_states: Float[Array, "B M D"],
    sampling: Sampling,
    noise: Float[Array, "B M Z"] | None,
) -> Float[Array, "B M K1 D"]:
    """States under one component a block: the likeliest, or in sampled rows the one that noise, if there is any, draws."""
    scores = mixture.log_priors(anchor_states)
    if noise is not None:
        scores = jnp.where(sampling.temperature[:, None, None] > 0, scores + noise, scores)
    return jnp.take_along_axis(mixture(states), argmax(scores)[:, :, None, None, None], axis=3)[:, :, :, 0]


def _match(
    drafter: Drafter,
    logits: Float[Array, "B M K1 V1"],
    anchors: Int[Array, "B M"],
    is_block: Bool[Array, "B M"],
    offsets: Int[Array, "B M"],
    keys: Key[Array, " B"],
    lengths: Int[Array, " B"],
    config: DecodeConfig,
) -> Match:
    """What the rule reads, and zeros for what it does not. Choices are the likeliest before any correction; a block draws its own later."""
    num_rows, num_blocks, num_drafts, _ = logits.shape
    continuations = jnp.zeros((num_rows, num_blocks, num_drafts), jnp.int32)
    if config.attach == "longest_prefix":
        continuations = argmax(drafter.spread(logits))
    seconds = jnp.full((num_rows, num_drafts), -1, jnp.int32)
    if config.is_second_tried:
        baseline = drafter.spread(logits[:, 0])
        is_first = jax.nn.one_hot(argmax(baseline), baseline.shape[-1], dtype=jnp.bool_)
        seconds = argmax(jnp.where(is_first, -jnp.inf, baseline))
    scores = jnp.zeros((num_rows, num_blocks, num_drafts + 1))
    if config.attach == "random":
        scores = random_scores(keys, lengths, num_blocks=num_blocks, block_size=num_drafts + 1)
    return Match(anchors=anchors, is_block=is_block, offsets=offsets, continuations=continuations, seconds=seconds, scores=scores)


def _cut(drafter: Drafter, states: Float[Array, "B M K1 D"], is_running: Bool[Array, " B"], draft: Draft, config: DecodeConfig) -> Draft:
    """Shorten blocks as the config asks; a shifted block whose site is cut off goes with it."""
    if not config.is_cut:
        return draft
    chances = confidences(drafter, states, draft.tokens[:, :, :-1])
    if config.steps_per_second:
        return draft._replace(kept=jnp.minimum(worth_their_cost(chances, draft.sites, is_running, config.steps_per_second), draft.kept))
    kept = above_threshold(chances, config.min_confidence)
    is_reached = (draft.sites >= 0) & (draft.sites < kept[:, :1])
    return draft._replace(kept=jnp.where(is_reached, kept, 0))


def _block_states(
    target: Target,
    drafter: Drafter,
    anchors: Int[Array, "B M"],
    committed: Committed,
    offsets: Int[Array, "B M"],
    visible: Bool[Array, "B M R"],
    retained: Retained,
) -> Float[Array, "B M K D"]:
    """States of every block's slots, `vmap`ped over blocks with committed context and retained states shared."""
    lengths = committed.lengths
    slots = jnp.arange(drafter.config.num_slots, dtype=jnp.int32)[None, :]
    positions = lengths[:, None] + retained.offsets - 1
    num_retained = positions.shape[1]
    # projected once, outside the vmap over blocks
    keys_values = drafter.context_keys_values(retained.features, positions) if num_retained else ()

    def block(anchors, offsets, visible):
        tokens = jnp.where(slots == 0, anchors[:, None], drafter.config.mask_token_id)
        return drafter.block_states(
            drafter.embed(target, tokens),
            lengths[:, None] + offsets[:, None] + slots,
            committed=committed,
            context=BlockContext(keys_values=keys_values, positions=positions, mask=visible) if num_retained else None,
        )

    return jax.vmap(block, in_axes=1, out_axes=1)(anchors, offsets, visible)


def _choose(
    target: Target, drafter: Drafter, blocks: _Blocks, first_positions: Int[Array, "B M"], pick: _Picker
) -> tuple[Int[Array, "B M K1"], Float[Array, "B M K1 V1"]]:
    """Tokens of blocks, and the logits they are taken from: corrected by what was drafted before where the drafter has a head for it."""
    head = drafter.causal_head
    if head is None:
        return pick(drafter.spread(blocks.logits), first_positions), blocks.logits
    if isinstance(head, RefinerHead):
        return _choose_in_passes(drafter, head, blocks, first_positions, pick)
    return _choose_in_turn(target, drafter, head, blocks, first_positions, pick)


def _choose_in_turn(
    target: Target, drafter: Drafter, head: GRUHead | MarkovHead, blocks: _Blocks, first_positions: Int[Array, "B M"], pick: _Picker
) -> tuple[Int[Array, "B M K1"], Float[Array, "B M K1 V1"]]:
    """Tokens of blocks whose logits are corrected by what was drafted before, one slot of all blocks at a time; and those logits."""
    num_plain = head.config.num_plain

    def step(carry, inputs):
        head_state, previous = carry
        index, z, base = inputs
        head_state, correction = head(head_state, previous, drafter.embed(target, previous), z)
        corrected = base + (jnp.where(index < num_plain, 0.0, correction) if num_plain else correction)
        token = pick(drafter.spread(corrected)[:, :, None], first_positions + index)[:, :, 0]
        return (head_state, token), (token, corrected)

    slots = jnp.arange(blocks.logits.shape[2], dtype=jnp.int32)
    inputs = (slots, jnp.moveaxis(blocks.states, 2, 0), jnp.moveaxis(blocks.logits, 2, 0))
    _, (tokens, corrected) = jax.lax.scan(step, (head.start(blocks.anchors.shape, blocks.states.dtype), blocks.anchors), inputs)
    return jnp.moveaxis(tokens, 0, 2), jnp.moveaxis(corrected, 0, 2)


def _choose_in_passes(
    drafter: Drafter, head: RefinerHead, blocks: _Blocks, first_positions: Int[Array, "B M"], pick: _Picker
) -> tuple[Int[Array, "B M K1"], Float[Array, "B M K1 V1"]]:
    """As `_choose_in_turn`, all slots at once behind the tokens of the pass before: after n passes the first n tokens are the same."""
    read = head.read(blocks.states)

    def refine(_, carry):
        previous = jnp.concatenate([blocks.anchors[:, :, None], carry[0][:, :, :-1]], axis=2)
        corrected = blocks.logits + head(read, previous)
        return pick(drafter.spread(corrected), first_positions), corrected

    num_passes = min(head.config.num_passes, blocks.logits.shape[2])  # from there on nothing changes
    return jax.lax.fori_loop(0, num_passes, refine, (pick(drafter.spread(blocks.logits), first_positions), blocks.logits))


def _pick(
    logits: Float[Array, "B M K1 V"],
    first_positions: Int[Array, "B M"],
    *,
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    sampling: Sampling,
    noise: Float[Array, "B P V"],
    draft_choice: DraftChoice,
    first_block: int,
) -> Int[Array, "B M K1"]:
    """Tokens from logits. first_positions: distance of the token before the first from the anchor, where the block is attached."""
    greedy = argmax(logits)
    if draft_choice == "argmax":
        return greedy
    rows, _, num_drafts, vocab_size = logits.shape
    # drafted token k of a block whose anchor stands at first_position is the token first_position + 1 + k after the round's anchor
    distance = first_positions[..., None] + 1 + jnp.arange(num_drafts, dtype=jnp.int32)[None, None, :]

    def sample():
        filtered = filter_logits(logits.reshape(rows, -1, vocab_size), sampling).reshape(logits.shape)
        if draft_choice == "coupled":
            flat = jnp.take_along_axis(noise, distance.reshape(rows, -1, 1) - 1, axis=1)
            perturbed = filtered + flat.reshape(logits.shape)
        else:
            positions = lengths[:, None, None] + distance
            own = draft_noise(keys, positions, first_block=first_block, vocab_size=vocab_size)
            perturbed = filtered + own
        return jnp.where(sampling.temperature[:, None, None] > 0, argmax(perturbed), greedy)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sample, lambda: greedy)
