"""Draft-OPD: a DFlash drafter learns from what the target made of its own drafts.

In: Blocks that were drafted before (`is_on_policy`), beside what the target says at each draft's place.
Out: half the forward divergence where drafts were accepted, half the decayed reverse divergence from the first rejection on; or, learning
    from prefixes alone, the forward divergence up to the first rejection, its place included.
Source: Draft-OPD (arXiv 2605.29343; ReAnchor Algorithm 4), over the whole vocabulary; its authors' program counts the correction among the
    accepted, too. What follows a wrong draft is where the published loss teaches a text that will not be written.
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


def prefix_loss(drafter, target, blocks, weights, progress) -> Scored:
    """KL(target || drafter) wherever all drafts before were accepted, each place alike."""
    del drafter, target, progress
    proposed = blocks.proposed
    is_reached = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None, None] <= proposed.num_accepted[..., None]
    divergences = divergence(proposed.logits, blocks.logits)
    return Scored(weighted_mean(divergences, jnp.where(is_reached & blocks.is_inside, 1.0, 0.0)), blocks.logits)


FAMILY = Family(settings=dflash.FAMILY.settings, loss=loss, is_on_policy=True)
PREFIXES = Family(settings=dflash.FAMILY.settings, loss=prefix_loss, is_on_policy=True)
