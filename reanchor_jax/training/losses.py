"""What losses are made of, in nats and float32: divergences of two distributions a slot, and their weighted mean over slots.

In: logits of drafter and target [*batch V], tokens, weights of slots.
Out: one number a slot, or one for the batch.
Source: DFlash (arXiv 2602.06036): weights exp(-(k-1)/gamma); DBloom (arXiv 2608.30427): more weight for newly exposed slots; D-PACE, as
    the open trainers have it: weights from the drafter's own chances.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.sampling import argmax

_CERTAINTY = 0.5  # D-PACE's alpha


def slot_weights(is_inside: Bool[Array, "B C K1"], *, decay: float, emphasis: float = 1.0, old_slots: int = 0) -> Float[Array, "B C K1"]:
    """exp(-(k-1)/decay) for the k-th drafted token, all alike if decay is 0, times emphasis beyond old_slots (0: nowhere); 0 outside."""
    drafted = jnp.arange(is_inside.shape[-1], dtype=jnp.float32)
    weights = jnp.exp(-drafted / decay) if decay else jnp.ones_like(drafted)
    if old_slots:
        weights = jnp.where(drafted >= old_slots, emphasis * weights, weights)
    return jnp.where(is_inside, weights[None, None], 0.0)


def reach_weights(losses: Float[Array, "B C K1"], is_inside: Bool[Array, "B C K1"]) -> Float[Array, "B C K1"]:
    """D-PACE: how many accepted drafts hang on each slot: the sum over slots m from it on of the chance that all up to m are right.

    losses: cross-entropies; a slot's chance exp(-loss) counts half, beside half a certainty, so that later slots weigh something at first.
    No gradient flows through the weights.
    """
    chances = (1 - _CERTAINTY) * jnp.exp(-jax.lax.stop_gradient(losses)) + _CERTAINTY
    reached = jnp.where(is_inside, jnp.cumprod(chances, axis=-1), 0.0)
    return jnp.where(is_inside, jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1), 0.0)


def weighted_mean(values: Float[Array, "*batch"], weights: Float[Array, "*batch"]) -> Float[Array, ""]:
    """Sum of weighted values over the sum of weights; 0 if all weigh nothing."""
    total = jnp.sum(weights)
    return jnp.sum(weights * values) / jnp.where(total > 0, total, 1.0)


def cross_entropy(logits: Float[Array, "*batch V"], tokens: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """-log q(token)."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def divergence(of: Float[Array, "*batch V"], to: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Kullback-Leibler divergence KL(of || to) of the distributions of two sets of logits."""
    log_of, log_to = jax.nn.log_softmax(of), jax.nn.log_softmax(to)
    return jnp.sum(jnp.exp(log_of) * (log_of - log_to), axis=-1)


def total_variation(one: Float[Array, "*batch V"], other: Float[Array, "*batch V"]) -> Float[Array, "*batch"]:
    """Half the sum of |p - q|: the chance that a draft of one is not accepted by the other, at best."""
    return 0.5 * jnp.sum(jnp.abs(jax.nn.softmax(one) - jax.nn.softmax(other)), axis=-1)


def hit_rates(logits: Float[Array, "B C K1 V"], tokens: Int[Array, "B C K1"], is_inside: Bool[Array, "B C K1"]) -> Float[Array, " K1"]:
    """Fraction of blocks whose k-th drafted token is right, whatever those before it are."""
    is_hit = (argmax(logits) == tokens) & is_inside
    return jnp.sum(is_hit, axis=(0, 1)) / jnp.maximum(jnp.sum(is_inside, axis=(0, 1)), 1)
