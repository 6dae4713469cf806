"""Cut drafted blocks where the drafter does not trust them, by a threshold or by what a verification costs.

In: for each drafted token, the chance that it is accepted if all before it are; costs from a profile.
Out: how many tokens of each block are verified.
Source: DSpark (arXiv 2607.05147) Algorithm 1. Its early stop is left out: it protects rejection sampling, whose acceptance depends on the
    drafted token; here a node's token is the target's own draw, and the cut uses nothing of the target.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.models.drafter import Drafter
from reanchor_jax.models.heads import MarkovHead


def confidences(drafter: Drafter, states: Float[Array, "B M K1 D"], previous: Int[Array, "B M K1"]) -> Float[Array, "B M K1"]:
    """Chance of each drafted token to be accepted, given those before it. previous: the token before each."""
    return jax.nn.sigmoid(log_odds(drafter, states, previous))


def log_odds(drafter: Drafter, states: Float[Array, "B M K1 D"], previous: Int[Array, "B M K1"]) -> Float[Array, "B M K1"]:
    """What `confidences` makes chances of."""
    head, confidence = drafter.causal_head, drafter.confidence
    assert confidence is not None  # `resolve_config` has refused drafters without one
    embedded = head.embedding(previous) if isinstance(head, MarkovHead) and confidence.config.reads_previous else None
    return confidence(states, embedded)


def above_threshold(chances: Float[Array, "B M K1"], threshold: float) -> Int[Array, "B M"]:
    """Tokens of each block before the first drafted one below the threshold, anchor included."""
    return 1 + jnp.sum(jnp.cumprod(chances >= threshold, axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)


def worth_their_cost(
    chances: Float[Array, "B M K1"], sites: Int[Array, "B M"], is_running: Bool[Array, " B"], steps_per_second: tuple[float, ...]
) -> Int[Array, "B M"]:
    """Tokens of each block that maximise the batch's estimated tokens per second, anchor included; 0 for a block without a site.

    steps_per_second: target passes per second with 1, 2, ... tokens; the last entry stands for all larger passes.
    The likeliest tokens go first: a token's chance is that of its whole path, which for a shifted block begins with the baseline's up to
    the site. Of all numbers of tokens the best is taken, so a staircase of costs is stepped over. Finished rows bring and cost nothing.
    An estimate: paths that exclude or share each other's tokens are added up as if they did not.
    """
    num_rows, num_blocks, num_drafts = chances.shape
    reach = jnp.cumprod(chances, axis=-1)
    # chance that the baseline is accepted up to each index; the anchor at index 0 is certain
    baseline = jnp.concatenate([jnp.ones((num_rows, 1), reach.dtype), reach[:, 0]], axis=1)
    at_site = jnp.where(sites >= 0, jnp.take_along_axis(baseline, jnp.maximum(sites, 0), axis=1), 0.0)
    reach = jnp.where(is_running[:, None, None], reach * at_site[..., None], 0.0).reshape(-1)
    num_running = jnp.sum(is_running, dtype=jnp.int32)
    order = jnp.argsort(-reach, stable=True)
    gains = jnp.concatenate([num_running[None].astype(reach.dtype), reach[order]])
    sizes = jnp.maximum(num_running, 1) + jnp.arange(gains.size, dtype=jnp.int32)
    speed = jnp.asarray(steps_per_second, jnp.float32)[jnp.minimum(sizes, len(steps_per_second)) - 1]
    num_taken = jnp.argmax(jnp.cumsum(gains) * speed)
    is_taken = jnp.zeros(reach.shape, bool).at[order].set(jnp.arange(reach.size) < num_taken) & (reach > 0)
    taken = jnp.sum(is_taken.reshape(num_rows, num_blocks, num_drafts), axis=-1, dtype=jnp.int32)
    # a shifted block of which nothing but the anchor is taken adds no node that the baseline has not
    return jnp.where((jnp.arange(num_blocks)[None] == 0) | (taken > 0), 1 + taken, 0)


def read_cost_table(path: Path | str, *, num_rows: int = 1, max_tokens: int = 1024) -> tuple[float, ...]:
    """Read target passes per second with 1..max_tokens tokens from a JSON profile, as `DecodeConfig.steps_per_second` takes it.

    Formats: `{"steps_per_second": {"1": ...}}`; `{"sample_batch_tokens": [...], "sample_steps_per_sec": [...]}`; and the additive
    `{"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}` (num_rows: rows it will run with). Between samples the
    next lower one counts, in the additive form they are interpolated.
    Raises ValueError for another format and for values that are no profile.
    """
    path = Path(path)
    try:
        return _read_costs(path, json.loads(path.read_text(encoding="utf-8")), num_rows, max_tokens)
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no cost table that can be used: {error}") from error


def _read_costs(path: Path, table: Any, num_rows: int, max_tokens: int) -> tuple[float, ...]:
    sizes = np.arange(1, max_tokens + 1)
    if isinstance(table, dict) and "bias_seconds" in table:
        rows = np.interp(num_rows, _numbers(path, table, "bs_probes"), _numbers(path, table, "alpha_seconds"))
        seconds = table["bias_seconds"] + rows + np.interp(sizes, _numbers(path, table, "m_probes"), _numbers(path, table, "theta_seconds"))
        speeds = 1 / seconds
    elif isinstance(table, dict) and ("sample_batch_tokens" in table or "steps_per_second" in table):
        if "steps_per_second" in table:
            pairs = sorted((int(size), float(speed)) for size, speed in table["steps_per_second"].items())
            table = {"sample_batch_tokens": [size for size, _ in pairs], "sample_steps_per_sec": [speed for _, speed in pairs]}
        samples, speeds = _numbers(path, table, "sample_batch_tokens"), _numbers(path, table, "sample_steps_per_sec")
        if len(samples) != len(speeds) or (np.diff(samples) <= 0).any():
            raise ValueError(f"{path}: sample_batch_tokens must rise strictly and have a speed each; measure it again.")
        speeds = speeds[np.maximum(np.searchsorted(samples, sizes, side="right") - 1, 0)]
    else:
        raise ValueError(
            f"{path} is no cost table; known are steps_per_second, sample_batch_tokens and the additive form with bias_seconds."
        )
    if not np.isfinite(speeds).all() or (speeds <= 0).any():
        raise ValueError(f"{path}: every speed must be a positive number; measure it again.")
    return tuple(speeds.tolist())


def _numbers(path: Path, table: dict[str, Any], name: str) -> np.ndarray:
    values = np.asarray(table.get(name, ()), float)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{path}: {name} must be a list of numbers; got {table.get(name)!r}.")
    return values
