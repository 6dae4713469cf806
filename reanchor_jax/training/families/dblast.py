"""DBLast: all slots of a block share one component of a mixture, so that its drafts depend on each other where the target is unsure.

In: Blocks, with the states of their first slots.
Out: minus the share of the drafts that the target is expected to accept, + 0.1 of the mixture's cross-entropy with the text a draft.
Source: DBLast (arXiv 2608.05448); the form of its loss is known from a description. Ours are sizes and names, the target's temperature,
    products that no threshold cuts, and the likelihood beside the length.
"""

from typing import Any

import jax
import jax.numpy as jnp

from reanchor_jax.decoding.sampling import argmax
from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import cross_entropy, total_variation

_NUM_COMPONENTS = 4
_LIKELIHOOD = 0.1  # its weight beside the expected length


def settings(causal_size: int, causal_width: int) -> dict[str, Any]:
    """Slots predict their own places, as DFlash's do; a mixture whose map has rank causal_size."""
    del causal_width
    return {"dflash_config": {"projector_type": "dblast", "mixture_rank": causal_size, "mixture_components": _NUM_COMPONENTS}}


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """A slot counts as far as those before it are accepted, so weights have no use; places outside the sequence count nothing."""
    del weights, progress
    mixture = drafter.latent_mixture
    log_priors = mixture.log_priors(blocks.anchor_states)
    logits = drafter.base_logits(target, mixture(blocks.states)).astype(jnp.float32)  # [B C K1 Z V]
    is_inside = blocks.is_inside[..., None]
    num_drafts = is_inside.shape[2]
    accepted = jnp.cumprod(1 - total_variation(logits, blocks.target_logits[:, :, :, None]), axis=2)
    length = jnp.sum(jnp.exp(log_priors) * jnp.sum(jnp.where(is_inside, accepted, 0.0), axis=2), axis=-1)
    each = cross_entropy(logits, jnp.broadcast_to(blocks.tokens[:, :, 1:, None], logits.shape[:-1]))
    likelihood = jax.nn.logsumexp(log_priors - jnp.sum(jnp.where(is_inside, each, 0.0), axis=2), axis=-1)
    likeliest = jnp.take_along_axis(logits, argmax(log_priors)[:, :, None, None, None], axis=3)[:, :, :, 0]
    return Scored(-jnp.mean(length + _LIKELIHOOD * likelihood) / num_drafts, likeliest)


FAMILY = Family(settings=settings, loss=loss, has_mixture=True)
