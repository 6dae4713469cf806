"""What a drafter family must say about itself to be trained.

In: -
Out: records.
Source: ours.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from reanchor_jax.config import Fusion, HeadKind
from reanchor_jax.models.drafter import Drafter
from reanchor_jax.models.target import Target
from reanchor_jax.training.packed import Blocks


class Scored(NamedTuple):
    """loss: of a batch, in nats. logits: those that choose the drafted tokens."""

    loss: Float[Array, ""]
    logits: Float[Array, "B C K1 V1"]


class Family(NamedTuple):
    """settings: entries of config.json beside those of a DFlash drafter, for its head's sizes (state, embedding or rank; inner width).

    loss: of blocks whose slots weigh `weights`, at a progress that rises from 0 (the first step) to 1 (behind the last).
    fusion: how its drafters fuse taps.
    head_kinds: of the causal heads that it trains; None is a drafter without one. has_confidence: whether it trains a confidence head.
    has_mixture: whether it trains a latent mixture.
    is_on_policy: whether blocks are those that the drafter drafts itself while it is trained.
    """

    settings: Callable[[int, int], dict[str, Any]]
    loss: Callable[[Drafter, Target, Blocks, Float[Array, "B C K1"], Float[Array, ""]], Scored]
    fusion: Fusion = "concatenated"
    head_kinds: tuple[HeadKind | None, ...] = (None,)
    has_confidence: bool = False
    has_mixture: bool = False
    is_on_policy: bool = False
