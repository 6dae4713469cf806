"""However blocks are cut, attached, retained or grown into trees, the output equals `autoregress`."""

import dataclasses

import numpy as np
import pytest
from lossless import SHORT, expect_equal, situation
from situations import BLOCK, small_config


@pytest.mark.parametrize(
    "cut",
    [{"min_confidence": 0.4}, pytest.param({"steps_per_second": (9.0, 8.0, 7.0, 6.5, 6.0, 5.5, 5.0, 4.0, 3.0)}, marks=pytest.mark.slow)],
    ids=["threshold", "cost"],
)
def test_blocks_cut_by_confidence_leave_the_output_equal(cut):
    config = dataclasses.replace(small_config("both", "coupled"), **cut)
    info = expect_equal(situation("flat", "dspark"), config, seed=3, max_new_tokens=SHORT).info
    # an uncut round verifies a whole baseline at least; some are cut, and not all to nothing
    nodes = np.asarray(info.num_nodes)[np.asarray(info.num_emitted) > 0]
    assert (nodes < BLOCK).any()
    assert (nodes > 1).any()


PROPOSALS = [
    {"attach": "longest_prefix", "retain": "suffix"},
    {"attach": "random", "retain": "descendants", "extent": "in_block"},
    {"attach": "original_offset", "extent": "extension"},
    {"attach": "original_offset_match", "draft_choice": "independent"},
    {"is_second_tried": True, "draft_choice": "coupled"},
]
TREES = [
    {"expand": "merge", "draft_choice": "coupled", "reliability": 0.5},
    {"expand": "marginal", "retain": "none", "max_offsets": 0, "draft_choice": "independent"},
    {"expand": "merge", "draft_choice": "independent", "num_nodes": BLOCK},
    {"expand": "merge", "retain": "descendants", "max_offsets": 0},
    {"expand": "marginal", "retain": "none", "max_offsets": 0, "draft_choice": "coupled", "num_ranks": 2},
]


@pytest.mark.parametrize("tree", [pytest.param(one, marks=[pytest.mark.slow] * (index > 0)) for index, one in enumerate(TREES)])
def test_grown_trees_leave_the_output_equal(tree):
    config = dataclasses.replace(small_config("both", "argmax"), **{"num_nodes": 20, **tree})
    for name in ("flat", "often_right"):
        info = expect_equal(situation(name), config, seed=9, max_new_tokens=SHORT).info
        assert (np.asarray(info.num_accepted) > 0).any()
        assert np.asarray(info.num_attached).any() == (config.retain != "none")


@pytest.mark.slow
def test_a_small_tree_too_keeps_the_states_of_the_baseline_it_holds():
    """Below two blocks the chain of likeliest tokens is not forced in; what is in of it is retained all the same."""
    config = dataclasses.replace(small_config("suffix", "argmax"), expand="merge", num_nodes=BLOCK + 2)
    info = expect_equal(situation("often_right"), config, seed=9, max_new_tokens=SHORT).info
    assert np.asarray(info.num_offsets).any()


@pytest.mark.parametrize("proposal", [pytest.param(one, marks=[pytest.mark.slow] * (index > 0)) for index, one in enumerate(PROPOSALS)])
def test_every_way_to_attach_and_retain_leaves_the_output_equal(proposal):
    config = dataclasses.replace(small_config("both", "argmax"), max_offsets=0, num_nodes=20, **proposal)
    for name in ("flat", "often_right"):
        info = expect_equal(situation(name), config, seed=4, max_new_tokens=SHORT).info
        assert np.asarray(info.num_attached).any()
