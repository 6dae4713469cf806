"""Arms, schedules and profiles whose figures are made by hand.

In: kinds of arms, seconds, tokens.
Out: Arm, Schedule, Profile.
Source: ours.
"""

import dataclasses

from situations import BLOCK

from reanchor_jax.bench.profiles import Profile
from reanchor_jax.decoding.config import Arm, Schedule

PLAIN = {"num_blocks": 0, "num_nodes": 1}
CHAIN = {"num_blocks": 1, "num_nodes": BLOCK, "is_chain": True}
MERGED = {"num_blocks": 3, "num_nodes": 13}


def arm(kind, seconds, tokens=(1.0, 1.0), *, sampled=None) -> Arm:
    """An arm whose cost is the same at every context unless seconds is a tuple."""
    seconds = seconds if isinstance(seconds, tuple) else (seconds,)
    return Arm(**kind, seconds=(seconds, sampled or seconds), tokens=tokens)


def schedule(*arms, contexts=(0,), spread=0.3) -> Schedule:
    return Schedule(arms=arms, contexts=contexts, spread=spread)


def made_profile(**changes) -> Profile:
    """Plain decoding, a chain and a merged tree at 10 and 50 tokens, for 1 row and, three times as slow, for 5."""
    arms = (arm(PLAIN, (1.0, 2.0)), arm(CHAIN, (2.0, 3.0), (3.0, 1.2)), arm(MERGED, (2.5, 3.5), (5.0, 1.3)))
    slower = tuple(dataclasses.replace(one, seconds=tuple(tuple(3 * x for x in row) for row in one.seconds)) for one in arms)
    fields = {"key": {}, "rows": (1, 5), "contexts": (10, 50), "arms": (arms, slower), "spread": 0.2}
    return Profile(**{**fields, **changes})
