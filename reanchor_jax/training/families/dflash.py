"""DFlash: every slot predicts its own token.

In: Blocks.
Out: cross-entropy of the base logits.
Source: DFlash (arXiv 2602.06036).
"""

from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import cross_entropy, weighted_mean


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """Weighted cross-entropy with the target's own text."""
    del drafter, target, progress
    return Scored(weighted_mean(cross_entropy(blocks.logits, blocks.tokens[:, :, 1:]), weights), blocks.logits)


FAMILY = Family(settings=lambda causal_size, causal_width: {}, loss=loss)
