"""Blocks begun at many anchors of known texts, drafted in one pass as decoding would draft them there.

In: drafter, frozen target, sequences, block anchors.
Out: Blocks: states and logits of every predicting slot, beside the tokens and states of the target at the same places.
Source: DFlash (arXiv 2602.06036): random anchors; embedding and head are the target's, frozen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.models.drafter import BlockContext, Drafter
from reanchor_jax.models.heads import GRUHead, MarkovHead, RefinerHead
from reanchor_jax.models.target import Target


class Proposed(NamedTuple):
    """What was drafted from the anchors and what became of it.

    tokens: the drafts. num_accepted: how many of them the target accepted. logits: of the target at each draft's place, behind the drafts
    before it, in float32.
    """

    tokens: Int[Array, "B C K1"]
    num_accepted: Int[Array, "B C"]
    logits: Float[Array, "B C K1 V"]


class Blocks(NamedTuple):
    """Blocks of a batch, K1 = num_drafts predicting slots each.

    tokens: the anchor and the text behind it; places past the sequence's end repeat its last token. is_inside: drafted places within it.
    states, logits: of the predicting slots, before any mixture; logits are the drafter's base logits, in float32.
    anchor_states: of the blocks' first slots.
    target_logits: of the target at the place of each drafted token, behind the text before it, in float32.
    proposed: of blocks that were drafted before, else None.
    """

    tokens: Int[Array, "B C K"]
    is_inside: Bool[Array, "B C K1"]
    states: Float[Array, "B C K1 D"]
    logits: Float[Array, "B C K1 V1"]
    anchor_states: Float[Array, "B C D"]
    target_logits: Float[Array, "B C K1 V"]
    proposed: Proposed | None = None


def packed_blocks(drafter: Drafter, target: Target, tokens: Int[Array, "B S"], anchors: Int[Array, "B C"]) -> Blocks:
    """Blocks begun at every anchor; no gradient flows into the target. anchors: positions of the blocks' known tokens, 1..S-1."""
    num_rows, length = tokens.shape
    positions = _places(tokens)
    target = jax.lax.stop_gradient(target)
    output = target(tokens, positions, prompt_mask(length), target_layer_ids=drafter.config.target_layer_ids)
    every_slot = packed_block_states(drafter, target, output.taps, tokens, anchors)
    states = drafter.predicting(every_slot)
    places = anchors[:, :, None] + jnp.arange(drafter.config.block_size, dtype=jnp.int32)[None, None]
    inside = jnp.minimum(places, length - 1)
    flat = inside.reshape(num_rows, -1)
    before = jnp.take_along_axis(output.states, inside[:, :, :-1].reshape(num_rows, -1, 1), axis=1)
    return Blocks(
        tokens=jnp.take_along_axis(tokens, flat, axis=1).reshape(inside.shape),
        is_inside=places[:, :, 1:] < length,
        states=states,
        logits=drafter.base_logits(target, states).astype(jnp.float32),
        anchor_states=every_slot[:, :, 0],
        target_logits=jax.lax.stop_gradient(target.logits(before.reshape(*states.shape[:-1], -1)).astype(jnp.float32)),
    )


def proposed_logits(
    target: Target, tokens: Int[Array, "B S"], anchors: Int[Array, "B C"], proposals: Int[Array, "B C K1"]
) -> Float[Array, "B C K1 V"]:
    """What the target says at the place of every proposed token, behind the text to the anchor and the proposals before it, in one pass."""
    num_rows, length = tokens.shape
    num_blocks, num_drafts = proposals.shape[1:]
    first = jnp.take_along_axis(tokens, anchors, axis=1)
    inputs = jnp.concatenate([first[:, :, None], proposals[:, :, :-1]], axis=2).reshape(num_rows, -1)
    places = (anchors[:, :, None] + jnp.arange(num_drafts, dtype=jnp.int32)[None, None]).reshape(num_rows, -1)
    text = _places(tokens)
    sees_text = text[:, None, :] < jnp.repeat(anchors, num_drafts, axis=1)[:, :, None]
    own = jnp.kron(jnp.eye(num_blocks, dtype=jnp.int32), jnp.tril(jnp.ones((num_drafts, num_drafts), jnp.int32))) > 0
    of_blocks = jnp.concatenate([sees_text, jnp.broadcast_to(own[None], (num_rows, *own.shape))], axis=2)
    of_text = jnp.pad(jnp.broadcast_to(prompt_mask(length), (num_rows, length, length)), ((0, 0), (0, 0), (0, own.shape[0])))
    output = target(
        jnp.concatenate([tokens, inputs], axis=1),
        jnp.concatenate([text, places], axis=1),
        jnp.concatenate([of_text, of_blocks], axis=1),
    )
    logits = target.logits(output.states[:, length:]).astype(jnp.float32)
    return jax.lax.stop_gradient(logits.reshape(num_rows, num_blocks, num_drafts, -1))


def packed_block_states(
    drafter: Drafter, target: Target, taps: Float[Array, "B S ED"], tokens: Int[Array, "B S"], anchors: Int[Array, "B C"]
) -> Float[Array, "B C K D"]:
    """States of the blocks begun at every anchor, all in one pass; each block sees the context before its anchor and itself.

    Equals decoding from that anchor. anchors: positions of the blocks' known tokens, 1..S-1.
    Where every layer is windowed, only the window before each anchor is gathered, so the cost does not grow with S.
    """
    config = drafter.config
    num_rows, num_blocks = anchors.shape
    length = tokens.shape[1]
    positions = _places(tokens)
    context = drafter.context_keys_values(drafter.features(taps), positions)
    reach = max(length if layer.window is None else min(layer.window - 1, length) for layer in config.layers)
    entries = anchors[:, :, None] - reach + jnp.arange(reach, dtype=jnp.int32)[None, None]

    def before(keys_values: Float[Array, "B 2G S A"]) -> Float[Array, "BC 2G W A"]:
        padded = jnp.pad(keys_values, ((0, 0), (0, 0), (reach, 0), (0, 0)))

        def take(row, anchor):
            return jax.lax.dynamic_slice_in_dim(row, anchor, reach, axis=1)

        taken = jax.vmap(jax.vmap(take, (None, 0)))(padded, anchors)
        return taken.reshape(num_rows * num_blocks, *taken.shape[2:])

    slots = jnp.arange(config.num_slots, dtype=jnp.int32)[None]
    first = jnp.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    block_tokens = jnp.where(slots == 0, first, config.mask_token_id)
    states = drafter.block_states(
        jax.lax.stop_gradient(drafter.embed(target, block_tokens)),
        anchors.reshape(-1, 1) + slots,
        context=BlockContext(
            keys_values=tuple(before(keys_values) for keys_values in context),
            positions=entries.reshape(num_rows * num_blocks, reach),
            mask=(entries >= 0).reshape(num_rows * num_blocks, reach),
        ),
    )
    return states.reshape(num_rows, num_blocks, *states.shape[1:])


def corrected_logits(drafter: Drafter, target: Target, blocks: Blocks) -> Float[Array, "B C K1 V1"]:
    """Logits after a sequential head's corrections, each token before being the text's own."""
    head = drafter.causal_head
    assert isinstance(head, GRUHead | MarkovHead)  # `train` has refused drafters without one

    def step(state, inputs):
        previous, z = inputs
        return head(state, previous, jax.lax.stop_gradient(drafter.embed(target, previous)), z)

    slots_first = jnp.moveaxis(blocks.tokens[:, :, :-1], 2, 0), jnp.moveaxis(blocks.states, 2, 0)
    _, corrections = jax.lax.scan(step, head.start(blocks.tokens.shape[:2], blocks.states.dtype), slots_first)
    corrections = jnp.moveaxis(corrections, 0, 2).astype(jnp.float32)
    is_plain = jnp.arange(corrections.shape[2], dtype=jnp.int32)[None, None, :, None] < head.config.num_plain
    return blocks.logits + jnp.where(is_plain, 0.0, corrections)


def refined_logits(drafter: Drafter, blocks: Blocks, tokens: Int[Array, "B C K1"]) -> Float[Array, "B C K1 V1"]:
    """Logits after a refiner's corrections, each token before being the anchor or one of the given drafts."""
    head = drafter.causal_head
    assert isinstance(head, RefinerHead)  # `train` has refused drafters without one
    previous = jnp.concatenate([blocks.tokens[:, :, :1], tokens[:, :, :-1]], axis=2)
    return blocks.logits + head(head.read(blocks.states), previous).astype(jnp.float32)


def _places(tokens: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The position of every token of whole sequences."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
