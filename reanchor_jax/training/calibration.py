"""Calibrate a confidence head: a temperature for each drafted token, from the first on, the earlier ones held.

In: models with a confidence head, beginnings of texts that were not trained on.
Out: Calibration.
Source: DSpark (arXiv 2607.05147), sequential temperature scaling: the product of the chances up to a token shall tell how often all drafts
    up to it are accepted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from reanchor_jax.decoding.confidence import log_odds
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.training.packed import packed_blocks
from reanchor_jax.training.rollouts import record_blocks

_NUM_BINS = 20
# nearest to 1 first: of temperatures that are equally good, the one that changes least
_GRID = np.asarray(sorted([1.0, *np.geomspace(0.05, 20.0, 256).tolist()], key=lambda value: abs(np.log(value))))


class Calibration(NamedTuple):
    """One number a drafted token. error_before, error_after: expected calibration error of the products, with temperature 1 and with these.

    num_blocks: drafted blocks they were fitted on.
    """

    temperatures: np.ndarray
    error_before: np.ndarray
    error_after: np.ndarray
    num_blocks: int


def calibrate(models: Models, prompts: np.ndarray, starts: np.ndarray, *, temperature: float = 0.0) -> Calibration:
    """Decode from beginnings of prompts [N S], each from its start on, and fit the temperatures to what became of the drafts.

    Raises ValueError if the drafter has no confidence head.
    """
    target, drafter = models
    if drafter is None or drafter.confidence is None:
        raise ValueError("the drafter has no confidence head; there is nothing to calibrate.")
    recorded = record_blocks(models, prompts, starts, temperature=temperature)
    found = np.asarray(_log_odds(target, drafter, recorded.tokens, recorded.anchors, recorded.proposals))
    # the last block of a row may have been cut by the row's end
    is_whole = np.arange(recorded.anchors.shape[1])[None] < recorded.num_blocks[:, None] - 1
    return fit_temperatures(found[is_whole], recorded.num_accepted[is_whole])


def fit_temperatures(log_odds: np.ndarray, num_accepted: np.ndarray) -> Calibration:
    """Fit to log-odds [N K1] at temperature 1 and accepted drafts [N] of N blocks.

    Raises ValueError if there is no block.
    """
    if not len(log_odds):
        raise ValueError("no block was drafted to its end; give more or longer texts to calibrate on.")
    reach = np.ones((2, len(log_odds)))  # products of the chances so far: with temperature 1, and with those found
    temperatures, before, after = [], [], []
    for index in range(log_odds.shape[1]):
        is_accepted = num_accepted > index
        errors = [calibration_error(reach[1] * _chance(log_odds[:, index] / value), is_accepted) for value in _GRID]
        best = int(np.argmin(errors))
        reach[0] *= _chance(log_odds[:, index])
        reach[1] *= _chance(log_odds[:, index] / _GRID[best])
        temperatures.append(_GRID[best])
        before.append(calibration_error(reach[0], is_accepted))
        after.append(errors[best])
    return Calibration(np.asarray(temperatures), np.asarray(before), np.asarray(after), num_blocks=len(log_odds))


def calibration_error(chances: np.ndarray, is_true: np.ndarray) -> float:
    """Expected calibration error of N chances in 20 bins of equal width: mean over chances of their bin's |mean chance - share of true|."""
    bins = np.minimum((chances * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
    differences = np.bincount(bins, weights=chances - is_true, minlength=_NUM_BINS)
    return float(np.abs(differences).sum() / len(chances))


def _chance(log_odds: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(log_odds.astype(np.float64) / 2))  # the logistic function, without overflow


@jax.jit
def _log_odds(
    target: Target, drafter: Drafter, tokens: Int[Array, "N S"], anchors: Int[Array, "N C"], proposals: Int[Array, "N C K1"]
) -> Float[Array, "N C K1"]:
    """Log-odds at temperature 1 of every proposed token, as they were when its block was drafted."""
    anchors = jnp.minimum(anchors, tokens.shape[1] - 1)  # rows with fewer blocks are padded beyond their end
    blocks = packed_blocks(drafter, target, tokens, anchors)
    before = jnp.take_along_axis(tokens, anchors, axis=1)[..., None]
    found = log_odds(drafter, blocks.states, jnp.concatenate([before, proposals[..., :-1]], axis=-1))
    temperatures = () if drafter.confidence is None else drafter.confidence.config.temperatures
    return found * jnp.asarray(temperatures, jnp.float32)[None, None] if temperatures else found
