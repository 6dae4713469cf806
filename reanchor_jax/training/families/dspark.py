"""DSpark: slots predict the place after their own, a Markov head corrects their logits, a confidence head tells what will be accepted.

In: Blocks; the tokens before are the text's own.
Out: 0.1 cross-entropy + 0.9 L1 distance to the target's distribution + cross-entropy of the confidence with the overlap of both.
Source: DSpark (arXiv 2607.05147); it compares with the target at temperature 1, the recipe here with a sharper one (target_temperature).
"""

from typing import Any

import jax
import optax

from reanchor_jax.models.heads import MarkovHead
from reanchor_jax.training.families.family import Family, Scored
from reanchor_jax.training.losses import cross_entropy, total_variation, weighted_mean
from reanchor_jax.training.packed import corrected_logits


def settings(causal_size: int, causal_width: int) -> dict[str, Any]:
    """A first-order Markov head of rank causal_size, which the confidence head reads too."""
    del causal_width
    own = {"projector_type": "dspark", "markov_rank": causal_size, "markov_head_type": "vanilla"}
    return {"dflash_config": {**own, "enable_confidence_head": True, "confidence_head_with_markov": True}}


def loss(drafter, target, blocks, weights, progress) -> Scored:
    """What the confidence should be is taken as it is: no gradient flows through it into the distributions."""
    del progress
    corrected = corrected_logits(drafter, target, blocks)
    distance = total_variation(corrected, blocks.target_logits)
    assert isinstance(drafter.causal_head, MarkovHead)
    assert drafter.confidence is not None
    log_odds = drafter.confidence(blocks.states, drafter.causal_head.embedding(blocks.tokens[:, :, :-1]))
    unsure = optax.sigmoid_binary_cross_entropy(log_odds, jax.lax.stop_gradient(1 - distance))
    each = 0.1 * cross_entropy(corrected, blocks.tokens[:, :, 1:]) + 0.9 * 2 * distance + unsure
    return Scored(weighted_mean(each, weights), corrected)


FAMILY = Family(settings=settings, loss=loss, head_kinds=("markov", "gated_markov", "rnn_markov"), has_confidence=True)
