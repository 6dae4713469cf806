"""Units of the summary, on figures small enough to work out by hand."""

import numpy as np
import pytest

from reanchor_jax.statistics import (
    ROUND_FIELDS,
    Rate,
    StepInfo,
    Trace,
    acceptance_lengths,
    accepted_within,
    agreement_after_rejection,
    alignment,
    earliest_win_rate,
    summarize,
    tau_per_prompt,
)


def stacked(num_emitted, **overrides):
    """Rounds by rows; every round of a running row accepts all but the bonus unless told otherwise."""
    emitted = np.asarray(num_emitted)
    fields = {name: np.zeros_like(emitted) for name in ROUND_FIELDS}
    fields |= {"num_emitted": emitted, "num_accepted": np.maximum(emitted - 1, 0), "is_shifted": np.zeros(emitted.shape, bool)}
    return StepInfo(emitted=None, **{**fields, **{name: np.asarray(value) for name, value in overrides.items()}})


# row 0: rounds of 4, 1 and 1 tokens; row 1: one round of 3; row 2 ended at its prefill token
INFO = stacked([[4, 3, 0], [1, 0, 0], [1, 0, 0]])


def test_tau_is_averaged_per_prompt_and_pooled_over_rounds():
    summary = summarize([INFO], block_size=4)
    assert summary.tau == pytest.approx((2 + 3) / 2)
    assert summary.tau_pooled == pytest.approx(9 / 4)
    assert summary.target_passes == 4
    assert summary.tau_standard_error == pytest.approx(np.std([2, 3], ddof=1) / np.sqrt(2))


def test_tau_per_prompt_keeps_the_order_of_prompts_over_several_generations():
    taus = tau_per_prompt([INFO, stacked([[5], [2]])])
    np.testing.assert_allclose(taus, [2, 3, np.nan, 3.5])


def test_the_histogram_counts_accepted_drafts_and_its_ceiling_a_full_block():
    """An accepted path may be longer than a block; a cut by the budget shortens what is emitted, not what was accepted."""
    info = stacked([[4, 3], [1, 2]], num_accepted=[[3, 6], [0, 5]])
    summary = summarize([info], block_size=4)
    assert summary.histogram == [1, 0, 0, 1, 0, 1, 1]
    assert summary.ceiling_rate == pytest.approx(3 / 4)
    assert summarize([INFO], block_size=6).histogram == [2, 0, 1, 1, 0, 0]


def test_means_leave_out_rounds_that_did_not_happen():
    info = stacked(
        [[4, 3], [1, 0]],
        num_nodes=[[9, 5], [7, 0]],
        num_offsets=[[0, 2], [4, 0]],
        num_attached=[[0, 1], [2, 0]],
        num_dropped=[[1, 0], [3, 0]],
        is_shifted=[[True, False], [False, False]],
    )
    summary = summarize([info], block_size=4)
    assert (summary.mean_nodes, summary.mean_offsets, summary.mean_attached) == (7, 2, 1)
    assert summary.shifted_rate == pytest.approx(1 / 3)
    assert summary.num_dropped == 4


def test_acceptance_lengths_are_the_tokens_of_each_round_of_a_row():
    assert acceptance_lengths(INFO, 0) == [4, 1, 1]
    assert acceptance_lengths(INFO, 1) == [3]
    assert acceptance_lengths(INFO, 2) == []


def test_a_method_without_rounds_has_zeros_and_no_warning():
    summary = summarize([stacked([[0, 0]])], block_size=4)
    assert summary.tau == summary.tau_pooled == summary.target_passes == 0
    assert summary.histogram == [0, 0, 0, 0]
    assert summary.tau_standard_error == 0


def traced():
    """Two rounds of one row, worked out by hand. Block size 4; the baseline of the first is rejected at its second draft."""
    blocks = np.asarray([[[9, 1, 2, 3], [2, 5, 6, 7], [8, 1, 1, 1]], [[4, 5, 6, 7], [6, 7, 7, 1], [0, 0, 0, 0]]], np.int32)[:, None]
    # first round: 9 1 2 3, and below 2 the shifted block's 5 6 7; the target says 1, then 4
    nodes = np.asarray([[9, 1, 2, 3, 5, 6, 7], [4, 5, 6, 7, 7, 1, 0]], np.int32)[:, None]
    parents = np.asarray([[0, 0, 1, 2, 2, 4, 5], [0, 0, 1, 2, 3, 4, 0]], np.int32)[:, None]
    targets = np.asarray([[1, 4, 3, 0, 6, 6, 0], [5, 6, 7, 7, 2, 0, 0]], np.int32)[:, None]
    depths = np.asarray([[0, 1, 2, 3, 3, 4, 5], [0, 1, 2, 3, 4, 5, 0]], np.int32)[:, None]
    trace = Trace(
        block_tokens=blocks,
        offsets=np.asarray([[0, 2, 1], [0, 1, 0]], np.int32)[:, None],
        is_block=np.asarray([[True, True, True], [True, True, False]])[:, None],
        node_tokens=nodes,
        parents=parents,
        depths=depths,
        blocks=np.asarray([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0]], np.int32)[:, None],
        is_node=np.asarray([[True] * 7, [True] * 6 + [False]])[:, None],
        target_tokens=targets,
    )
    return stacked([[2], [5]])._replace(trace=trace), np.asarray([[9, 1, 4, 5, 6, 7, 7, 2]])


def test_agreement_counts_drafts_behind_the_first_rejected_one():
    info, _ = traced()
    # first round: 2 is rejected for 4; behind it the draft 3 is what the target says behind 2. The second round accepts its whole block.
    assert agreement_after_rejection([info]) == {0: Rate(hits=1, total=1), 1: Rate(hits=1, total=1)}


def test_alignment_tells_blocks_that_match_elsewhere_or_more_than_once():
    info, _ = traced()
    # anchor 2 stands at index 2, its own offset; 8 nowhere; anchor 6 of the second round at 2, its offset is 1
    assert alignment([info]) == (Rate(hits=2, total=3), Rate(hits=1, total=2), Rate(hits=0, total=2))
    twice = info.trace.block_tokens.copy()
    twice[0, 0, 0, 3] = 2
    assert alignment([info._replace(trace=info.trace._replace(block_tokens=twice))]).multiple == Rate(hits=1, total=2)


def test_the_earliest_site_wins_where_no_other_path_accepts_more():
    info, tokens = traced()
    # first round: 9 1 2 5 .. accepts one draft, as the baseline does: tested, won. Second: 4 5 6 7 7 accepts 4, the baseline 3: won
    assert earliest_win_rate([info], [tokens]) == Rate(hits=2, total=2)
    # with a 6 at index 1 too, the earlier site accepts nothing and the later one as much as before
    later = info.trace.block_tokens.copy()
    later[1, 0, 0, 1] = 6
    changed = info._replace(trace=info.trace._replace(block_tokens=later))
    text = np.asarray([[9, 1, 4, 6, 6, 7, 7, 2]])
    assert earliest_win_rate([changed], [text]) == Rate(hits=1, total=2)


def test_sub_shapes_of_a_verified_trie_are_scored_without_the_models():
    info, _ = traced()
    everything = accepted_within(info.trace, np.ones(7, bool))
    assert everything.tolist() == [[1], [4]]
    assert accepted_within(info.trace, np.arange(7) < 4).tolist() == [[1], [3]]
    assert accepted_within(info.trace, np.arange(7) != 1).tolist() == [[0], [0]]
    assert accepted_within(info.trace, np.arange(7) < 0).tolist() == [[-1], [-1]]


def test_rounds_without_a_trace_are_refused():
    with pytest.raises(ValueError, match="decode with a config of has_trace=True"):
        agreement_after_rejection([INFO])


def test_tokens_that_spell_the_baseline_without_being_its_chain_count_for_nothing():
    info, _ = traced()
    # first round: the node of 3 hangs below the anchor, a sibling that no draft made
    parents = info.trace.parents.copy()
    parents[0, 0, 3] = 0
    assert agreement_after_rejection([info._replace(trace=info.trace._replace(parents=parents))]) == {}
    # a baseline that was cut: padding holds 0, and so does the draft
    blocks, nodes, is_node = info.trace.block_tokens.copy(), info.trace.node_tokens.copy(), info.trace.is_node.copy()
    blocks[0, 0, 0, 3], nodes[0, 0, 3], is_node[0, 0, 3] = 0, 0, False
    cut = info.trace._replace(block_tokens=blocks, node_tokens=nodes, is_node=is_node)
    assert agreement_after_rejection([info._replace(trace=cut)]) == {}
    # other tokens in the trie than the block's
    nodes = info.trace.node_tokens.copy()
    nodes[0, 0, 3] = 4
    assert agreement_after_rejection([info._replace(trace=info.trace._replace(node_tokens=nodes))]) == {}


def test_groups_that_fall_short_of_the_best_path_are_not_tested():
    info, tokens = traced()
    # first round: the shifted block attaches at index 1 now, where its path accepts nothing and the baseline one draft
    blocks = info.trace.block_tokens.copy()
    blocks[0, 0, 1] = [1, 8, 8, 8]
    text = np.asarray([[9, 1, 2, 5, 6, 7, 7, 2]])
    changed = info._replace(trace=info.trace._replace(block_tokens=blocks))._replace(num_emitted=np.asarray([[2], [5]]))
    assert earliest_win_rate([changed], [text]).total == 1
    # what stands past the last token emitted is nobody's
    assert earliest_win_rate([info], [np.pad(tokens, ((0, 0), (0, 9)), constant_values=7)]) == earliest_win_rate([info], [tokens])
