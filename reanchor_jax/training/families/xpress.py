"""xPress: a causal refiner corrects the base logits of a whole block at once, pass after pass.

In: Blocks; the tokens before are the text's own, the base logits' choice, or what three passes have drafted.
Out: (cross-entropy + total variation to the target) behind the text, + 0.6 of it behind the base's choice, + 0.3 of it after three passes.
Source: xPress (arXiv 2608.02438); the shape of its loss is known from a description, sizes, names and the
    target's temperature are ours.
"""

from typing import Any

from reanchor_jax.decoding.sampling import argmax
from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import cross_entropy, total_variation, weighted_mean
from reanchor_jax.training.packed import refined_logits

_ANCHORED, _FREE = 0.6, 0.3  # weights beside the text's own
_NUM_ROUNDS = 3  # of drafting freely


def settings(causal_size: int, causal_width: int) -> dict[str, Any]:
    """Slots predict their own places, as DFlash's do; a refiner of rank causal_size."""
    return {"dflash_config": {"projector_type": "xpress", "refiner_rank": causal_size, "refiner_width": causal_width}}


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """Drafts are fed back as they are: no gradient flows through the choice of a token."""
    del target, progress
    tokens = blocks.tokens[:, :, 1:]

    def distance(logits):
        return weighted_mean(cross_entropy(logits, tokens) + total_variation(logits, blocks.target_logits), weights)

    forced = refined_logits(drafter, blocks, tokens)
    anchored = free = refined_logits(drafter, blocks, argmax(blocks.logits))
    for _ in range(_NUM_ROUNDS - 1):  # the first round is the one above
        free = refined_logits(drafter, blocks, argmax(free))
    return Scored(distance(forced) + _ANCHORED * distance(anchored) + _FREE * distance(free), forced)


FAMILY = Family(settings=settings, loss=loss, head_kinds=("refiner",))
