"""Pick what a round does by what it costs and what it may be expected to bring.

In: a Schedule (static), how many drafts were accepted lately beside how many were promised.
Out: the arm of the next round; the fading counts after a round.
Source: ours; a gamma estimate of how many drafts a row accepts, and one standard deviation of hope. Nothing of the round's own target pass
    is read, so the choice cannot bias a token.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.config import Schedule

_KEPT = 0.9  # of the counts a round: about ten rounds are remembered
_KEPT_PLAIN = 0.997  # a plain token: after some 300 of them an arm that was given up may be tried again
# rounds of drafting over which what the first of them costs is spread, if so many are left: as many as are remembered
_ROUNDS_AHEAD = 10
# standard deviations above the estimate: an arm that would pay in one of six texts is tried, and given up as soon as the text shows not to
# be one; a trial costs what it is slower by, and more hope costs more trials on texts that do not pay
OPTIMISM = 1.0


class Acceptance(NamedTuple):
    """Fading counts of drafts, in tokens.

    accepted: by the target. promised: what the arms' measured figures would have brought.
    """

    accepted: Float[Array, " B"]
    promised: Float[Array, " B"]


def init_acceptance(num_rows: int) -> Acceptance:
    """Nothing seen yet."""
    return Acceptance(accepted=jnp.zeros((num_rows,), jnp.float32), promised=jnp.zeros((num_rows,), jnp.float32))


def pick_arm(
    schedule: Schedule,
    acceptance: Acceptance,
    *,
    temperature: Float[Array, " B"],
    lengths: Int[Array, " B"],
    remaining: Int[Array, " B"],
    num_retained: Int[Array, " B"],
    num_unread: Int[Array, " B"],
    num_places: int,
    is_running: Bool[Array, " B"],
) -> Int[Array, ""]:
    """Index of the arm that promises most tokens a second to all running rows together.

    A row takes no more than its remaining tokens. Arms with shifted blocks are left out where no row has a state to draft one from; an arm
    of one block is worth there what rounds of the best of them bring behind it, if that is more.
    num_unread: tokens the drafter has to read first, num_places in a pass; that is spread over the rounds left, at most over ten or as many
        as there are passes.
    """
    promised = 1 + _factor(schedule, acceptance)[:, None] * promised_drafts(schedule, temperature)
    tokens = jnp.sum(jnp.where(is_running[:, None], jnp.minimum(promised, remaining[:, None].astype(jnp.float32)), 0.0), axis=0)
    context = jnp.max(jnp.where(is_running, lengths, 0)).astype(jnp.float32)
    is_sampled = jnp.any(is_running & (temperature > 0))
    contexts = jnp.asarray(schedule.contexts, jnp.float32)
    seconds = jnp.stack(
        [jnp.interp(context, contexts, jnp.where(is_sampled, *map(jnp.float32, reversed(arm.seconds)))) for arm in schedule.arms]
    )
    num_blocks = np.asarray([arm.num_blocks for arm in schedule.arms])
    rounds_left = jnp.max(jnp.where(is_running[:, None], remaining[:, None].astype(jnp.float32) / promised, 1.0), axis=0)
    if num_blocks.any():
        # a pass over so many tokens costs about what the cheapest round does that drafts and verifies a block
        num_passes = jnp.ceil(jnp.max(jnp.where(is_running, num_unread, 0)).astype(jnp.float32) / num_places)
        num_rounds = jnp.clip(rounds_left, 1.0, jnp.maximum(num_passes, _ROUNDS_AHEAD))
        reading = num_passes / num_rounds * jnp.min(jnp.where(num_blocks == 1, seconds, jnp.inf))
        seconds = jnp.where(num_blocks > 0, seconds + reading, seconds)
    rates = tokens / seconds
    if np.any(num_blocks > 1):
        is_shifted, has_states = num_blocks > 1, jnp.any(is_running & (num_retained > 0))
        then = jnp.argmax(jnp.where(is_shifted, rates, -jnp.inf))
        num_more = jnp.clip(rounds_left[then], 1.0, float(_ROUNDS_AHEAD)) - 1
        led = (tokens + num_more * tokens[then]) / (seconds + num_more * seconds[then])
        first = jnp.where(is_shifted, -jnp.inf, jnp.where(num_blocks == 1, jnp.maximum(rates, led), rates))
        rates = jnp.where(has_states, rates, first)
    return jnp.argmax(rates).astype(jnp.int32)


def promised_drafts(schedule: Schedule, temperature: Float[Array, " B"]) -> Float[Array, "B arms"]:
    """Drafts that each arm was measured to have accepted in a round; between temperature 0 and 1 interpolated, above 1 as at 1."""
    tokens = jnp.asarray([arm.tokens for arm in schedule.arms], jnp.float32)
    share = jnp.clip(temperature, 0.0, 1.0)[:, None]
    return (1 - share) * tokens[None, :, 0] + share * tokens[None, :, 1] - 1


def count(
    acceptance: Acceptance,
    *,
    num_accepted: Int[Array, " B"],
    promised: Float[Array, " B"],
    num_plain: Int[Array, " B"],
    is_running: Bool[Array, " B"],
) -> Acceptance:
    """The counts after a round that drafted and had so many drafts accepted, or decoded so many tokens plainly (num_plain above 0)."""
    is_plain = num_plain > 0
    kept = jnp.where(is_plain, _KEPT_PLAIN ** num_plain.astype(jnp.float32), _KEPT)
    kept = jnp.where(is_running, kept, 1.0)
    is_counted = is_running & ~is_plain
    return Acceptance(
        accepted=kept * acceptance.accepted + jnp.where(is_counted, num_accepted.astype(jnp.float32), 0.0),
        promised=kept * acceptance.promised + jnp.where(is_counted, promised, 0.0),
    )


def _factor(schedule: Schedule, acceptance: Acceptance) -> Float[Array, " B"]:
    """Drafts a row may accept for each that was promised: the estimate, and OPTIMISM standard deviations more.

    Before anything is seen the factor is gamma-distributed with mean 1 and standard deviation `spread`; accepted drafts are Poisson events.
    """
    strength = 1 / schedule.spread**2
    accepted, promised = strength + acceptance.accepted, strength + acceptance.promised
    return (accepted + OPTIMISM * jnp.sqrt(accepted)) / promised
