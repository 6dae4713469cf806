"""Draft-OPD: a DFlash drafter learns from what the target made of its own drafts.

In: Blocks that were drafted before (`is_on_policy`), beside what the target says at each draft's place.
Out: half the forward divergence where drafts were accepted, half the decayed reverse divergence from the first rejection on.
Source: Draft-OPD (arXiv 2605.29343; ReAnchor Algorithm 4), over the whole vocabulary.
"""

import jax.numpy as jnp

from reanchor_jax.training.families import dflash
from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import divergence, weighted_mean


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """KL(target || drafter) on accepted drafts, each alike; KL(drafter || target) on those discarded, weighted by slot."""
    del drafter, target, progress
    proposed = blocks.proposed
    is_accepted = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, None] < proposed.num_accepted[..., None]
    accepted = weighted_mean(divergence(proposed.logits, blocks.logits), jnp.where(is_accepted & blocks.is_inside, 1.0, 0.0))
    rejected = weighted_mean(divergence(blocks.logits, proposed.logits), jnp.where(is_accepted, 0.0, weights))
    return Scored((accepted + rejected) / 2, blocks.logits)


FAMILY = Family(settings=dflash.FAMILY.settings, loss=loss, is_on_policy=True)
