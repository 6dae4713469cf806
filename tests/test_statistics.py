"""Units of the summary, on figures small enough to work out by hand."""

import numpy as np
import pytest

from reanchor_jax.statistics import StepInfo, acceptance_lengths, summarize, tau_per_prompt


def stacked(num_emitted, **overrides):
    """Rounds by rows; every round of a running row accepts all but the bonus unless told otherwise."""
    emitted = np.asarray(num_emitted)
    fields = {name: np.zeros_like(emitted) for name in StepInfo._fields if name != "emitted"}
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
