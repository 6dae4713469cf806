"""Draft the baseline block and all shifted blocks in one batched pass, and choose their tokens.

In: the anchor, the drafter's context cache, retained states.
Out: block tokens and the site where each shifted block attaches.
Source: ReAnchor Algorithm 1 (lines 1-14). Blocks never see each other; the committed context is shared, never copied per block.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from reanchor_jax.cache import Committed
from reanchor_jax.config import DraftChoice
from reanchor_jax.decoding.attach import find_sites
from reanchor_jax.decoding.retain import Retained
from reanchor_jax.decoding.sampling import Sampling, argmax, draft_noise, filter_logits
from reanchor_jax.models.drafter import BlockContext, Drafter
from reanchor_jax.models.target import Target


class Draft(NamedTuple):
    """Drafted blocks; block 0 is the baseline, block r + 1 is drafted from retained entry r.

    tokens: slot 0 is the block's anchor. Padding blocks hold 0.
    sites: baseline index where the block attaches; -1 for a block without one and for padding.
    """

    tokens: Int[Array, "B M K"]
    sites: Int[Array, "B M"]


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
    num_blocks: int,
    draft_choice: DraftChoice,
) -> Draft:
    """Draft num_blocks blocks for every row: the baseline and one per retained entry.

    noise: the target's own noise for the tokens 1, 2, ... positions after the anchor; read only by the coupled choice.
    """
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
    logits = _block_logits(target, drafter, block_anchors, committed, offsets, visible, retained)

    choose = partial(_choose, lengths=committed.lengths, keys=keys, sampling=sampling, noise=noise, draft_choice=draft_choice)

    baseline = choose(logits[:, :1], jnp.zeros_like(offsets[:, :1]), first_block=0)[:, 0]
    baseline = jnp.concatenate([anchors[:, None], baseline], axis=1)
    sites = find_sites(baseline, block_anchors, is_block)
    if not num_shifted:
        return Draft(tokens=baseline[:, None], sites=sites)
    # a continuation is drawn with the noise of the positions where it is attached, not of those where it was drafted
    shifted = choose(logits[:, 1:], jnp.maximum(sites[:, 1:], 0), first_block=1)
    shifted = jnp.concatenate([block_anchors[:, 1:, None], shifted], axis=2)
    shifted = jnp.where(is_block[:, 1:, None], shifted, 0)
    return Draft(tokens=jnp.concatenate([baseline[:, None], shifted], axis=1), sites=sites)


def _block_logits(
    target: Target,
    drafter: Drafter,
    anchors: Int[Array, "B M"],
    committed: Committed,
    offsets: Int[Array, "B M"],
    visible: Bool[Array, "B M R"],
    retained: Retained,
) -> Float[Array, "B M K1 V"]:
    """Logits of slots 1..K-1 of every block, `vmap`ped over blocks with committed context and retained states shared."""
    lengths = committed.lengths
    slots = jnp.arange(drafter.config.block_size, dtype=jnp.int32)[None, :]
    positions = lengths[:, None] + retained.offsets - 1
    num_retained = positions.shape[1]
    # projected once, outside the vmap over blocks
    keys_values = drafter.context_keys_values(retained.features, positions) if num_retained else ()

    def block(anchors, offsets, visible):
        tokens = jnp.where(slots == 0, anchors[:, None], drafter.config.mask_token_id)
        return drafter.block_states(
            target.embedding(tokens),
            lengths[:, None] + offsets[:, None] + slots,
            committed=committed,
            context=BlockContext(keys_values=keys_values, positions=positions, mask=visible) if num_retained else None,
        )

    states = jax.vmap(block, in_axes=1, out_axes=1)(anchors, offsets, visible)
    return target.logits(states[:, :, 1:])


def _choose(
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
    """Tokens of slots 1..K-1. first_positions: distance of each block's slot 0 from the anchor, where the block is attached."""
    greedy = argmax(logits)
    if draft_choice == "argmax":
        return greedy
    rows, _, num_drafts, vocab_size = logits.shape
    # slot k of a block whose slot 0 stands at first_position predicts the token first_position + k after the anchor
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
