"""What a drafter is trained to do: predict, at every slot of a block, the token the target wrote there.

In: drafter, frozen target, sequences, block anchors.
Out: a weighted cross-entropy and per-slot hit rates.
Source: DFlash (arXiv 2602.06036): random anchors, weights exp(-(k-1)/gamma); embedding and head are the target's, frozen.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reanchor_jax.decoding.sampling import argmax
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.models.drafter import BlockContext, Drafter
from reanchor_jax.models.target import Target


class LossInfo(NamedTuple):
    """hit_rates: fraction of anchors whose slot k + 1 is right, whatever its earlier slots are, for k = 0..K-2."""

    hit_rates: Float[Array, " K1"]


def tapped_states(target: Target, tokens: Int[Array, "B S"], target_layer_ids: tuple[int, ...]) -> Float[Array, "B S ED"]:
    """Tapped target states of whole sequences; no gradient flows into them."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    output = target(tokens, positions, prompt_mask(tokens.shape[1]), target_layer_ids=target_layer_ids)
    return jax.lax.stop_gradient(output.taps)


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
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)
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


def dflash_loss(
    drafter: Drafter,
    target: Target,
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B C"],
    *,
    decay: float,
) -> tuple[Float[Array, ""], LossInfo]:
    """Cross-entropy in nats of slots 1..K-1, weighted exp(-(k-1)/decay); slots past the sequence's end weigh nothing."""
    config = drafter.config
    taps = tapped_states(target, tokens, config.target_layer_ids)
    states = drafter.predicting(packed_block_states(drafter, target, taps, tokens, anchors))
    logits = drafter.base_logits(target, states).astype(jnp.float32)
    ahead = jnp.arange(1, config.block_size, dtype=jnp.int32)[None, None]
    places = anchors[:, :, None] + ahead
    is_inside = places < tokens.shape[1]
    labels = jnp.take_along_axis(tokens, jnp.minimum(places, tokens.shape[1] - 1).reshape(tokens.shape[0], -1), axis=1).reshape(
        places.shape
    )
    weights = jnp.where(is_inside, jnp.exp((1.0 - ahead.astype(jnp.float32)) / decay), 0.0)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    loss = -jnp.sum(weights * log_probs) / jnp.maximum(jnp.sum(weights), 1.0)
    is_hit = (argmax(logits) == labels) & is_inside
    hit_rates = jnp.sum(is_hit, axis=(0, 1)) / jnp.maximum(jnp.sum(is_inside, axis=(0, 1)), 1)
    return loss, LossInfo(hit_rates=hit_rates)
