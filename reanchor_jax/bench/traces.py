"""What becomes of rejected tokens and of shifted blocks: the paper's Tables 1, 5 and 8, on any prompts.

In: Models, prompts as token ids, a DecodeConfig that drafts, a Request.
Out: a JSON dict of counts and shares, and lines of Markdown.
Source: ReAnchor, Tables 1, 5 and 8; the units are those of `statistics`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from reanchor_jax.bench.methods import Request, begin, outcomes, run_rounds
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import Rate, StepInfo, agreement_after_rejection, alignment, earliest_win_rate

_FARTHEST = 8  # distances from a rejected token that are told one by one


def trace_statistics(
    models: Models, prompts: Sequence[Sequence[int]], config: DecodeConfig, *, request: Request, show_progress: bool = True
) -> dict[str, Any]:
    """Decode all prompts once more, keeping what every round proposed, and count.

    `agreement`: drafts behind the baseline's first rejected token that equal the target's own choice there, and `agreement_by_distance`
    from it. `matched`: shifted blocks whose first token stands in the baseline; of these `shifted_only`, not at their own offset, and
    `multiple`, at several places. `earliest_wins`: blocks whose earliest place is as good as any, of those that reach the best path.
    """
    config = replace(config, has_trace=True)
    infos: list[StepInfo] = []
    tokens: list[np.ndarray] = []
    for first in tqdm(range(0, len(prompts), request.batch_size), unit="batch", desc="traces", disable=not show_progress, leave=False):
        indices = range(first, min(first + request.batch_size, len(prompts)))
        state, begun = begin(models, prompts, indices, config=config, request=request)
        state, info = run_rounds(models, state, config=config, request=request)
        found = outcomes(begun, info, state, len(indices))
        texts = np.full((len(indices), request.max_new_tokens), -1)
        for row, outcome in enumerate(found):
            texts[row, : len(outcome.tokens)] = outcome.tokens
        count = len(indices)
        infos.append(jax.tree.map(lambda values, count=count: np.asarray(values)[:, :count], info._replace(emitted=None)))
        tokens.append(texts)
    agreement, blocks = agreement_after_rejection(infos), alignment(infos)
    return {
        "agreement": _share(agreement.get(0, Rate(hits=0, total=0))),
        "agreement_by_distance": {distance: _share(rate) for distance, rate in agreement.items() if distance},
        "matched": _share(blocks.matched),
        "shifted_only": _share(blocks.shifted_only),
        "multiple": _share(blocks.multiple),
        "earliest_wins": _share(earliest_win_rate(infos, tokens)),
    }


def statistics_lines(found: Mapping[str, Any], *, method: str) -> list[str]:
    """A Markdown table of `trace_statistics`."""
    distances = ", ".join(
        f"{distance}: {_percent(rate)}" for distance, rate in found["agreement_by_distance"].items() if distance <= _FARTHEST
    )
    rows = {
        "drafts behind a rejected one that equal the target's choice": found["agreement"],
        "shifted blocks whose first token stands in the baseline": found["matched"],
        "… of these, not at their own offset": found["shifted_only"],
        "… of these, at several places": found["multiple"],
        "… whose earliest place is as good as any": found["earliest_wins"],
    }
    lines = ["", f"Traces of {method}:", "", "| | share | of |", "|---|---|---|"]
    lines += [f"| {text} | {_percent(rate)} | {rate['total']:,} |" for text, rate in rows.items()]
    return [*lines, "", f"Agreement by distance from the rejected token: {distances or 'none'}."]


def _share(rate: Rate) -> dict[str, Any]:
    return {"hits": rate.hits, "total": rate.total, "share": rate.share if rate.total else None}


def _percent(rate: Mapping[str, Any]) -> str:
    return "-" if rate["share"] is None else f"{rate['share']:.1%}"
