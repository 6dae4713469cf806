"""What a traced run counts, against the same counted from the blocks of every round by hand."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from situations import flat, small_config, small_models

from reanchor_jax import generate, make_sampling
from reanchor_jax.bench.methods import Request
from reanchor_jax.bench.traces import statistics_lines, trace_statistics
from reanchor_jax.statistics import accepted_within

PROMPTS = [[3, 1, 4], [15, 9, 2, 6, 5], [35]]


@pytest.fixture(scope="module")
def models():
    return flat(small_models(3))


def test_a_trace_holds_what_the_round_did(models):
    """At temperature 1 with coupled drafts nearly flat logits give rounds of every kind."""
    config = small_config("both", "coupled")
    traced = functools.partial(generate, models, np.asarray([[3, 1, 4, 15]]), np.asarray([4]), jax.random.key(2))
    request = {"sampling": make_sampling(1, temperature=1.0), "max_new_tokens": 30}
    plain = traced(config=config, **request)
    result = traced(config=dataclasses.replace(config, has_trace=True), **request)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    info = jax.tree.map(np.asarray, result.info)
    is_round = info.num_emitted > 0
    trace = info.trace
    everything = accepted_within(trace, np.ones(trace.is_node.shape[-1], bool))
    np.testing.assert_array_equal(everything[is_round], info.num_accepted[is_round])
    np.testing.assert_array_equal(trace.is_node.sum(axis=-1)[is_round], info.num_nodes[is_round])
    np.testing.assert_array_equal(trace.is_block.sum(axis=-1)[is_round], 1 + info.num_offsets[is_round])
    text = np.asarray(result.tokens)[0]
    starts = np.cumsum(info.num_emitted[:, 0]) - info.num_emitted[:, 0]
    for step in np.flatnonzero(is_round[:, 0]):
        # every block begins with its anchor: the baseline's is the newest token
        assert trace.block_tokens[step, 0, 0, 0] == text[starts[step]]
        assert trace.node_tokens[step, 0, 0] == text[starts[step]]
        # the target's token at the anchor is the first token emitted
        assert trace.target_tokens[step, 0, 0] == text[starts[step] + 1]
        assert (trace.offsets[step, 0, 1:][trace.is_block[step, 0, 1:]] >= 1).all()
    assert not trace.is_block[~is_round].any()
    assert not trace.block_tokens[~is_round].any()


@pytest.mark.slow
def test_counts_of_all_prompts_add_up_and_are_told(models):
    request = Request(max_new_tokens=20, temperature=1.0, batch_size=2, cache_length=64)
    found = trace_statistics(models, PROMPTS, small_config("both", "coupled"), request=request, show_progress=False)
    assert found["matched"]["total"] > 0
    assert found["shifted_only"]["total"] == found["multiple"]["total"] == found["matched"]["hits"]
    assert found["agreement"]["total"] == sum(rate["total"] for rate in found["agreement_by_distance"].values())
    assert 0 < found["earliest_wins"]["total"] <= found["matched"]["hits"]
    lines = statistics_lines(found, method="reanchor")
    share = found["matched"]
    assert f"| shifted blocks whose first token stands in the baseline | {share['share']:.1%} | {share['total']} |" in lines
