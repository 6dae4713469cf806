"""Prefill in chunks against one pass over each whole prompt."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from situations import small_config, small_models

from reanchor_jax import prefill
from reanchor_jax.decoding.walk import LENGTH, RUNNING, STOP

LENGTHS = np.asarray([1, 63, 64, 65, 150], np.int32)
ROWS, LONGEST = 5, 150


@functools.cache
def prefilled(family):
    models = small_models(3, family=family)
    tokens = np.random.default_rng(7).integers(61, size=(ROWS, LONGEST)).astype(np.int32)
    # behind a prompt stands anything
    tokens = np.where(np.arange(LONGEST)[None] < LENGTHS[:, None], tokens, -100)
    config = replace(small_config("both", "coupled"), cache_length=200)

    @jax.jit
    def begin(models, tokens, lengths, stops):
        budgets = jnp.asarray([9, 9, 9, 1, 9], jnp.int32)
        return prefill(models, tokens, lengths, jax.random.key(0), config=config, max_new_tokens=9, stop_token_ids=stops, budgets=budgets)

    return models, tokens, begin, begin(models, tokens, LENGTHS, jnp.full(1, -1, jnp.int32))


@jax.jit
def one_pass(models, tokens):
    count = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), tokens.shape)
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    output = models.target(tokens, positions, mask, target_layer_ids=models.drafter.config.target_layer_ids)
    context = models.drafter.context_keys_values(models.drafter.features(output.taps), positions)
    return output.keys_values, context, jax.nn.log_softmax(models.target.logits(output.states))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunks_fill_both_caches_as_one_pass_does_and_give_its_first_token(family):
    models, tokens, _, (state, first) = prefilled(family)
    keys_values, context, log_probs = one_pass(models, np.maximum(tokens, 0))
    np.testing.assert_array_equal(state.lengths, LENGTHS)
    for row, length in enumerate(LENGTHS):
        for ours, theirs in zip((*state.target_cache, *state.drafter_cache), (*keys_values, *context), strict=True):
            np.testing.assert_allclose(ours[row, :, :length], theirs[row, :, :length], atol=1e-5)
        token = int(np.argmax(log_probs[row, length - 1]))
        assert first.tokens[row].tolist() == [token]
        assert int(state.anchors[row]) == token
        np.testing.assert_allclose(first.log_probs[row, 0], log_probs[row, length - 1, token], atol=1e-4)


def test_the_first_token_counts_against_the_budget_and_may_stop_its_row():
    models, tokens, begin, (state, first) = prefilled("llama")
    assert first.num_emitted.tolist() == [1] * ROWS
    assert state.remaining.tolist() == [8, 8, 8, 0, 8]
    assert state.finish.tolist() == [RUNNING, RUNNING, RUNNING, LENGTH, RUNNING]
    stop = int(first.tokens[2, 0])
    stopped, _ = begin(models, tokens, LENGTHS, jnp.asarray([stop], jnp.int32))
    reasons = [STOP if int(token) == stop else old for token, old in zip(first.tokens[:, 0], state.finish.tolist(), strict=True)]
    assert stopped.finish.tolist() == reasons
    assert not state.retained.counts.any()
