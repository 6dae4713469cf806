"""What a round did, and figures over many rounds; every unit is defined here once.

In: StepInfo of one round [B], or stacked over rounds [rounds B].
Out: Summary per method.
Source: ReAnchor, Experiments (tau, acceptance histogram of Figure 2).
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Emitted(NamedTuple):
    """Tokens a pass emitted, of which the first num_emitted of a row are real; the rest is padding of any value.

    log_probs: nats, the target's own. processed_log_probs: nats, after temperature and filters; 0 at temperature 0.
    """

    tokens: Int[Array, "B P"]
    log_probs: Float[Array, "B P"]
    processed_log_probs: Float[Array, "B P"]
    num_emitted: Int[Array, " B"]


class StepInfo(NamedTuple):
    """One round, row by row; finished rows hold 0 everywhere.

    emitted: the round's tokens; None in the stacked info of a whole generation, whose tokens stand in its result.
    num_emitted: tokens committed by the round, bonus included.
    num_accepted: draft tokens the target agreed with before any cut by a stop token or the budget.
    num_nodes: trie nodes verified, anchor included.
    num_offsets: shifted blocks drafted. num_attached: of those, the ones whose anchor stood in the baseline.
    num_dropped: nodes left out of the trie because its capacity was reached.
    is_shifted: whether the accepted path ended on a shifted block's node.
    """

    emitted: Emitted | None
    num_emitted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    num_nodes: Int[Array, " B"]
    num_offsets: Int[Array, " B"]
    num_attached: Int[Array, " B"]
    num_dropped: Int[Array, " B"]
    is_shifted: Bool[Array, " B"]


class Summary(NamedTuple):
    """Figures of one method over many prompts.

    tau: tokens committed per round, bonus included and prefill token excluded; per prompt, then averaged (the paper's).
    tau_standard_error: of that average over prompts; 0 for a single prompt.
    tau_pooled: the same over all rounds of all prompts.
    target_passes: rounds of all prompts; the prefill is not one.
    histogram: rounds by number of accepted drafts, 0, 1, 2, ...
    ceiling_rate: fraction of rounds that accept at least every draft of one block (block_size - 1).
    mean_nodes, mean_offsets, mean_attached: per round. shifted_rate: fraction of rounds whose path ended on a shifted block.
    num_dropped: trie nodes dropped in all rounds.
    """

    tau: float
    tau_standard_error: float
    tau_pooled: float
    target_passes: int
    histogram: list[int]
    ceiling_rate: float
    mean_nodes: float
    mean_offsets: float
    mean_attached: float
    shifted_rate: float
    num_dropped: int


def tau_per_prompt(infos: list[StepInfo]) -> np.ndarray:
    """Tokens per round of each prompt, in order; nan for a prompt that ended at its prefill token. infos: stacked [rounds B]."""
    return np.concatenate([_row_tau(np.asarray(info.num_emitted)) for info in infos])


def acceptance_lengths(info: StepInfo, row: int) -> list[int]:
    """Tokens committed in each round of one row, bonus included. info: stacked [rounds B]."""
    counts = np.asarray(info.num_emitted)[:, row]
    return counts[counts > 0].tolist()


def summarize(infos: list[StepInfo], *, block_size: int) -> Summary:
    """Summarize the stacked infos of several generations. Prompts that ended at their prefill token count in no average."""
    taus = tau_per_prompt(infos)
    taus = taus[~np.isnan(taus)]
    fields = {
        name: np.concatenate([np.asarray(getattr(info, name)).ravel() for info in infos]) for name in StepInfo._fields if name != "emitted"
    }
    is_round = fields["num_emitted"] > 0
    rounds = {name: values[is_round] for name, values in fields.items()}
    num_rounds = int(is_round.sum())
    accepted = rounds["num_accepted"]
    histogram = np.bincount(accepted, minlength=block_size)

    def mean(values) -> float:
        return float(np.mean(values)) if num_rounds else 0.0

    return Summary(
        tau=float(taus.mean()) if taus.size else 0.0,
        tau_standard_error=float(taus.std(ddof=1) / np.sqrt(taus.size)) if taus.size > 1 else 0.0,
        tau_pooled=mean(rounds["num_emitted"]),
        target_passes=num_rounds,
        histogram=histogram.tolist(),
        ceiling_rate=mean(accepted >= block_size - 1) if block_size > 1 else 0.0,
        mean_nodes=mean(rounds["num_nodes"]),
        mean_offsets=mean(rounds["num_offsets"]),
        mean_attached=mean(rounds["num_attached"]),
        shifted_rate=mean(rounds["is_shifted"]),
        num_dropped=int(rounds["num_dropped"].sum()),
    )


def _row_tau(num_emitted: np.ndarray) -> np.ndarray:
    rounds = (num_emitted > 0).sum(axis=0)
    return np.where(rounds > 0, num_emitted.sum(axis=0) / np.maximum(rounds, 1), np.nan)
