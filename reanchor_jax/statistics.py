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


class Trace(NamedTuple):
    """Everything a round proposed, and what the target said to it; finished rows hold 0 and False everywhere.

    block_tokens: tokens of every block, its anchor first; with `expand`, each slot's likeliest. Block 0 is the baseline.
    offsets: distance of each block's anchor from the round's. is_block: False for padding.
    node_tokens, parents, depths, blocks, is_node: the trie verified, as in `decoding.trie.Trie`.
    target_tokens: the target's own token after each node.
    """

    block_tokens: Int[Array | np.ndarray, "B M K"]
    offsets: Int[Array | np.ndarray, "B M"]
    is_block: Bool[Array | np.ndarray, "B M"]
    node_tokens: Int[Array | np.ndarray, "B N"]
    parents: Int[Array | np.ndarray, "B N"]
    depths: Int[Array | np.ndarray, "B N"]
    blocks: Int[Array | np.ndarray, "B N"]
    is_node: Bool[Array | np.ndarray, "B N"]
    target_tokens: Int[Array | np.ndarray, "B N"]


class StepInfo(NamedTuple):
    """One round, row by row; finished rows hold 0 everywhere.

    emitted: the round's tokens; None in the stacked info of a whole generation, whose tokens stand in its result.
    num_emitted: tokens committed by the round, bonus included.
    num_accepted: draft tokens the target agreed with before any cut by a stop token or the budget.
    num_nodes: trie nodes verified, anchor included.
    num_offsets: shifted blocks drafted. num_attached: of those, the ones whose anchor stood in the baseline, or on a node grown from it.
    num_dropped: nodes left out of the trie because its capacity was reached.
    num_plain: tokens decoded plainly, each by a target pass of its own: 1 where nothing is drafted, more where a schedule draws several in
        one round; 0 in rounds that draft.
    is_shifted: whether the accepted path ended on a shifted block's node.
    trace: everything proposed, if the config asks for it (`has_trace`), else None.
    """

    emitted: Emitted | None
    num_emitted: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    num_nodes: Int[Array, " B"]
    num_offsets: Int[Array, " B"]
    num_attached: Int[Array, " B"]
    num_dropped: Int[Array, " B"]
    num_plain: Int[Array, " B"]
    is_shifted: Bool[Array, " B"]
    trace: Trace | None = None


ROUND_FIELDS = tuple(name for name in StepInfo._fields if name not in ("emitted", "trace"))  # one number a round and row


class Rate(NamedTuple):
    """How many of how many; `share` is nan of none."""

    hits: int
    total: int

    @property
    def share(self) -> float:
        return self.hits / self.total if self.total else float("nan")


class Summary(NamedTuple):
    """Figures of one method over many prompts.

    A round is one target pass here: plain tokens of a schedule count one by one.
    tau: tokens committed per round, bonus included and prefill token excluded; per prompt, then averaged (the paper's).
    tau_standard_error: of that average over prompts; 0 for a single prompt.
    tau_pooled: the same over all rounds of all prompts.
    target_passes: rounds of all prompts; the prefill is not one.
    histogram: rounds by number of accepted drafts, 0, 1, 2, ...
    ceiling_rate: fraction of rounds that accept at least every draft of one block (block_size - 1).
    mean_nodes, mean_offsets, mean_attached: per round. shifted_rate: fraction of rounds whose path ended on a shifted block.
    plain_rate: fraction of target passes that drafted nothing.
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
    plain_rate: float
    num_dropped: int


def per_pass(info: StepInfo) -> StepInfo:
    """The stacked info [rounds B] on the host with an entry for every target pass: rounds of several plain tokens become as many of one.

    Emitted tokens and traces are left out.
    """
    fields = {name: np.asarray(getattr(info, name)) for name in ROUND_FIELDS}
    plain = fields["num_plain"]
    counts = plain.max(axis=1, initial=1)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    fields = {name: np.repeat(values, counts, axis=0) for name, values in fields.items()}
    is_here = place[:, None] < np.maximum(fields["num_plain"], 1)
    is_plain = fields["num_plain"] > 0
    for name in ("num_emitted", "num_nodes", "num_plain"):
        fields[name] = np.where(is_plain, 1, fields[name])
    fields = {name: np.where(is_here, values, np.zeros((), values.dtype)) for name, values in fields.items()}
    return info._replace(emitted=None, trace=None, **fields)


def tau_per_prompt(infos: list[StepInfo]) -> np.ndarray:
    """Tokens per target pass of each prompt, in order; nan for a prompt that ended at its prefill token. infos: stacked [rounds B]."""
    return np.concatenate([_row_tau(np.asarray(per_pass(info).num_emitted)) for info in infos])


def acceptance_lengths(info: StepInfo, row: int) -> list[int]:
    """Tokens committed by each target pass of one row, bonus included. info: stacked [rounds B]."""
    counts = np.asarray(per_pass(info).num_emitted)[:, row]
    return counts[counts > 0].tolist()


def summarize(infos: list[StepInfo], *, block_size: int) -> Summary:
    """Summarize the stacked infos of several generations. Prompts that ended at their prefill token count in no average."""
    passes = [per_pass(info) for info in infos]
    taus = np.concatenate([_row_tau(np.asarray(info.num_emitted)) for info in passes])
    taus = taus[~np.isnan(taus)]
    fields = {name: np.concatenate([np.asarray(getattr(info, name)).ravel() for info in passes]) for name in ROUND_FIELDS}
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
        plain_rate=mean(rounds["num_plain"]),
        num_dropped=int(rounds["num_dropped"].sum()),
    )


def agreement_after_rejection(infos: list[StepInfo]) -> dict[int, Rate]:
    """Drafts of the baseline behind its first rejected token that equal the target's own choice there, by distance from that token.

    Key 0 holds all distances together (the paper's Table 1). infos: stacked, with traces.
    """
    found: dict[int, list[int]] = {}
    for trace, _, _ in _traced_rounds(infos):
        block = trace.block_tokens[0]
        size = block.size
        # the baseline's own nodes come first, in order, if the trie holds all of them
        is_chain = trace.is_node[:size].all() and (trace.parents[1:size] == np.arange(size - 1)).all()
        agrees = block[1:] == trace.target_tokens[: size - 1]
        if agrees.all() or not is_chain or not (trace.node_tokens[:size] == block).all():
            continue
        rejected = int(np.argmin(agrees))
        for distance, agreed in enumerate(agrees[rejected + 1 :].tolist(), start=1):
            for key in (0, distance):
                found.setdefault(key, []).append(agreed)
    return {key: Rate(hits=sum(values), total=len(values)) for key, values in sorted(found.items())}


class Alignment(NamedTuple):
    """Shifted blocks whose anchor token stands somewhere in the baseline: the paper's Table 5.

    matched: of all shifted blocks. shifted_only: of the matched, those that match elsewhere but not at their own offset.
    multiple: of the matched, those that match at more than one index.
    """

    matched: Rate
    shifted_only: Rate
    multiple: Rate


def alignment(infos: list[StepInfo]) -> Alignment:
    """Where shifted blocks match the baseline. infos: stacked, with traces."""
    sites = [
        (np.flatnonzero(trace.block_tokens[0] == trace.block_tokens[block, 0]), int(trace.offsets[block]))
        for trace, _, _ in _traced_rounds(infos)
        for block in np.flatnonzero(trace.is_block)[1:]
    ]
    matched = [(found, offset) for found, offset in sites if found.size]
    return Alignment(
        matched=Rate(hits=len(matched), total=len(sites)),
        shifted_only=Rate(hits=sum(offset not in found for found, offset in matched), total=len(matched)),
        multiple=Rate(hits=sum(found.size > 1 for found, _ in matched), total=len(matched)),
    )


def earliest_win_rate(infos: list[StepInfo], tokens: list[Int[np.ndarray, "B max_new_tokens"]]) -> Rate:
    """How often the earliest site of a shifted block is as good as any, the paper's Table 8.

    A group is a shifted block that matches; it is tested if one of its paths accepts as many drafts as the best path of all its sites and
    the baseline. Accepted are the tokens that the target went on to emit. infos: stacked, with traces. tokens: what each emitted, the
    prefill's token first.
    """
    wins = []
    for trace, info_index, (row, start) in _traced_rounds(infos):
        end = 1 + np.asarray(infos[info_index].num_emitted)[:, row].sum()
        future, blocks = np.asarray(tokens[info_index])[row, start:end], np.asarray(trace.block_tokens)
        baseline = blocks[0]
        for own in blocks[1:][np.asarray(trace.is_block)[1:]]:
            sites = np.flatnonzero(baseline == own[0])
            if not sites.size:
                continue
            lengths = [_num_accepted(np.concatenate([baseline[:site], own])[1:], future) for site in sites]
            best = max(*lengths, _num_accepted(baseline[1:], future))
            if max(lengths) == best:
                wins.append(lengths[0] == best)
    return Rate(hits=sum(wins), total=len(wins))


def accepted_within(trace: Trace, is_kept: Bool[np.ndarray, "*rounds N"]) -> Int[np.ndarray, "*rounds"]:
    """Drafts that would have been accepted had the round verified only the nodes kept, the anchor among them; -1 for no round.

    trace: stacked in any way, [*rounds N]. A node whose parent is not kept cannot be reached. So the first n nodes of a tree grown best
    first score a budget of n: `accepted_within(trace, np.arange(N) < n)`. Of that round alone: later rounds would begin elsewhere.
    """
    tokens, parents, targets, is_node = (
        np.asarray(field) for field in (trace.node_tokens, trace.parents, trace.target_tokens, trace.is_node)
    )
    is_kept = np.broadcast_to(is_kept, is_node.shape) & is_node
    is_accepted = np.zeros(is_node.shape, bool)
    is_accepted[..., 0] = is_kept[..., 0]
    for node in range(1, is_node.shape[-1]):  # parents precede children
        parent = parents[..., node, None]
        expected = np.take_along_axis(targets, parent, axis=-1)[..., 0]
        reached = np.take_along_axis(is_accepted, parent, axis=-1)[..., 0]
        is_accepted[..., node] = is_kept[..., node] & reached & (tokens[..., node] == expected)
    return is_accepted.sum(axis=-1) - 1


def _traced_rounds(infos: list[StepInfo]):
    """Every round that happened: its trace on the host, the info it stands in, its row and the tokens emitted before it."""
    for index, info in enumerate(infos):
        if info.trace is None:
            raise ValueError("these rounds have no trace; decode with a config of has_trace=True.")
        trace = Trace(*(np.asarray(field) for field in info.trace))
        counts = np.asarray(info.num_emitted)
        starts = 1 + np.cumsum(counts, axis=0) - counts
        for step, row in zip(*np.nonzero(counts), strict=True):
            yield Trace(*(field[step, row] for field in trace)), index, (int(row), int(starts[step, row]))


def _num_accepted(path: Int[np.ndarray, " P"], future: Int[np.ndarray, " T"]) -> int:
    size = min(path.size, future.size)
    differs = path[:size] != future[:size]
    return int(np.argmax(differs)) if differs.any() else size


def _row_tau(num_emitted: np.ndarray) -> np.ndarray:
    rounds = (num_emitted > 0).sum(axis=0)
    return np.where(rounds > 0, num_emitted.sum(axis=0) / np.maximum(rounds, 1), np.nan)
