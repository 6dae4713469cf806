"""A policy is trained on its own rollouts, drafted by a frozen drafter: one compilation, log-probabilities of the policy as it is now."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lossless import BEST
from situations import FAVOURITE, prompts, small_models

from reanchor_jax import autoregress, checkpoint, generate, make_sampling, summarize
from reanchor_jax.decoding.loop import _generate
from reanchor_jax.decoding.verify import prompt_mask

ROWS, NEW, UPDATES = 6, 24, 20


def text_log_probs(target, tokens, lengths, result):
    """Log-probabilities [B NEW] of the emitted tokens by one full pass over prompts and answers, and which of them are real."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    places = lengths[:, None] + jnp.arange(NEW, dtype=jnp.int32)[None]
    text = jnp.pad(tokens, ((0, 0), (0, NEW))).at[rows, places].set(result.tokens)
    positions = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32)[None], text.shape)
    logits = target.logits(target(text, positions, prompt_mask(text.shape[1])).states)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(text, -1, axis=1)[..., None], axis=-1)[..., 0]
    is_real = jnp.arange(NEW, dtype=jnp.int32)[None] < result.lengths[:, None]
    return jnp.where(is_real, log_probs[rows, places - 1], 0.0), is_real


@pytest.mark.slow
def test_twenty_updates_of_a_policy_compile_once_and_keep_log_probabilities_of_a_full_pass():
    models = small_models(3)
    tokens, lengths = map(jnp.asarray, prompts(ROWS, seed=2))
    sampling = make_sampling(ROWS, temperature=1.0)
    optimizer = optax.adam(2e-2)
    weights = checkpoint.leaves(models.target)
    state = optimizer.init(weights)

    @jax.jit
    def update(weights, state, result):
        rewards = jnp.sum(result.tokens == FAVOURITE, axis=1).astype(jnp.float32)
        advantages = rewards - jnp.mean(rewards)

        def loss(weights):
            policy = checkpoint.with_leaves(models.target, weights)
            return -jnp.mean(advantages * jnp.sum(text_log_probs(policy, tokens, lengths, result)[0], axis=1))

        changes, state_after = optimizer.update(jax.grad(loss)(weights), state, weights)
        return optax.apply_updates(weights, changes), state_after, jnp.mean(rewards)

    full = jax.jit(lambda weights, result: text_log_probs(checkpoint.with_leaves(models.target, weights), tokens, lengths, result)[0])
    rewards, taus, compiled = [], [], []
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        for step in range(UPDATES):
            policy = models._replace(target=checkpoint.with_leaves(models.target, weights))
            request = {"config": BEST, "sampling": sampling, "max_new_tokens": NEW}
            result = generate(policy, tokens, lengths, jax.random.key(step), **request)
            compiled.append(_generate._cache_size())
            np.testing.assert_allclose(result.log_probs, full(weights, result), atol=1e-4, rtol=0)
            if step == UPDATES - 1:  # the drafter never learned of the policy's changes; the text is the policy's all the same
                plain = autoregress(policy, tokens, lengths, jax.random.key(step), **request)
                np.testing.assert_array_equal(result.tokens, plain.tokens)
            taus.append(summarize([result.info], block_size=models.drafter.config.block_size).tau)
            weights, state, reward = update(weights, state, result)
            rewards.append(float(reward))
    assert len(set(compiled)) == 1
    assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5]) + 0.5
    assert all(tau >= 1 for tau in taus)
    assert len({round(tau, 3) for tau in taus}) > 1  # it drifts with the policy, and is there to be watched
