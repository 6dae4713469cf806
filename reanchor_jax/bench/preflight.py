"""Tell from the rounds of the plain chain whether a longer block is worth training.

In: Runs of the method dflash, of each benchmark.
Out: lines of text: the acceptance histogram, its ceiling bin, advice.
Source: DBloom (arXiv 2608.30427), Preflight: rounds that accept the whole block are limited by it, which a mean hides. Responses count that
    ended by themselves, as repetition feigns acceptance. It names no threshold: ours lies between its ceilings before and after.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from reanchor_jax.bench import tables
from reanchor_jax.bench.compare import CHAIN, Run
from reanchor_jax.bench.methods import Outcome, temperature_name
from reanchor_jax.models.drafter import Models

HIGH_CEILING = 0.15  # DBloom's sets with much to gain had 0.20 to 0.26 in blocks of 16, and 0.05 to 0.07 in blocks of 24 afterwards

_FEW_ROUNDS = 200


def report(runs: Mapping[str, Sequence[Run]], *, models: Models, temperature: float) -> list[str]:
    """The histogram of the chain's rounds over all sources, the ceiling of each, and what it says.

    runs: by the name of their source; other methods' are passed over.
    """
    assert models.drafter is not None
    block_size = models.drafter.config.block_size
    outcomes = {name: [outcome for run in mine if run.method == CHAIN for outcome in run.outcomes] for name, mine in runs.items()}
    every = [outcome for mine in outcomes.values() for outcome in mine]
    num_ended = sum(outcome.finish_reason == "stop" for outcome in every)
    counted = {name: [outcome for outcome in mine if outcome.finish_reason == "stop" or not num_ended] for name, mine in outcomes.items()}
    pooled = [outcome for mine in counted.values() for outcome in mine]
    histogram = _histogram(pooled, block_size)
    if not sum(histogram):
        return ["preflight: the chain made no rounds; ask for more tokens or other prompts."]
    ceilings = {name: tables.shares(_histogram(mine, block_size), block_size=block_size)[-1] for name, mine in counted.items() if mine}
    ceiling = tables.shares(histogram, block_size=block_size)[-1]
    text = tables.histograms({"methods": {CHAIN: {"histogram": histogram}}}, [CHAIN], block_size=block_size, width=60)
    if num_ended:
        whose = f"Counted: the {num_ended} of {len(every)} responses that ended by themselves."
    else:
        whose = f"None of {len(every)} responses ended by itself, so all count; repetition may feign acceptance: raise --max-new-tokens."
    if ceiling >= HIGH_CEILING:
        config = models.drafter.config
        is_dflash = (config.head, config.mixture, config.fusion, config.is_shifted) == (None, None, "concatenated", False)
        how = f"--start THIS --old-slots {config.num_drafts}{'' if is_dflash else ', its --family'} and a longer --block-size"
        if is_dflash and block_size == 16:
            how = "--recipe dbloom --start THIS"
        advice = f"at or above {HIGH_CEILING:.0%}: the block is what limits, a longer one is worth training (train {how})."
    else:
        advice = f"below {HIGH_CEILING:.0%}: the drafter errs before the block ends, a longer one is not worth training."
    return [
        f"preflight: rounds of {CHAIN} at temperature {temperature_name(temperature)} by accepted drafts",
        text,
        whose,
        f"Ceiling: {ceiling:.1%} of {sum(histogram):,} rounds accept the whole block of {block_size} ("
        + ", ".join(f"{name} {share:.1%}" for name, share in ceilings.items())
        + ").",
        f"That is {advice} The threshold is ours, DBloom names none.",
        *([] if temperature == 0 else ["DBloom's test is greedy; above temperature 0 fewer drafts are accepted, whatever the block."]),
        *([] if sum(histogram) >= _FEW_ROUNDS else [f"{sum(histogram)} rounds say little: ask for more prompts or tokens."]),
    ]


def _histogram(outcomes: Sequence[Outcome], block_size: int) -> list[int]:
    accepted = [count for outcome in outcomes for count in outcome.rounds["num_accepted"]]
    return np.bincount(np.asarray(accepted, int), minlength=block_size).tolist()
