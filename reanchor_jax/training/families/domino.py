"""Domino: a GRU over the tokens so far corrects the base logits.

In: Blocks; the tokens before are the text's own.
Out: cross-entropy of base logits at the start of training, of corrected ones at its end.
Source: Domino (arXiv 2605.29707): (1 - lambda) CE(corrected) + lambda CE(base), lambda falling from 1 to 0.
"""

from typing import Any

from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import cross_entropy, weighted_mean
from reanchor_jax.training.packed import corrected_logits


def settings(causal_size: int, causal_width: int) -> dict[str, Any]:
    """Slots predict their own places, as DFlash's do; every drafted token has a correction."""
    own = {
        "projector_type": "domino",
        "gru_hidden_dim": causal_size,
        "emb_dim": causal_width,
        "pure_draft_prefix_len": 0,
        "shift_label": False,
    }
    return {"architectures": ["DominoDraftModel"], "dflash_config": own}


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """Both cross-entropies in one; base logits are learned first."""
    tokens = blocks.tokens[:, :, 1:]
    corrected = corrected_logits(drafter, target, blocks)
    base = weighted_mean(cross_entropy(blocks.logits, tokens), weights)
    return Scored(progress * weighted_mean(cross_entropy(corrected, tokens), weights) + (1 - progress) * base, corrected)


FAMILY = Family(settings=settings, loss=loss, head_kinds=("gru",))
