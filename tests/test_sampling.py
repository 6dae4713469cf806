"""Filters against the steps written out in numpy, noise against `jax.random`, and the edges of the temperature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from reanchor_jax.decoding.sampling import argmax, choose, draft_noise, filter_logits, make_sampling, position_noise, row_keys

ROWS, PLACES, VOCAB = 19, 3, 23

filter_jit = jax.jit(filter_logits)
choose_jit = jax.jit(choose)
noise_jit = jax.jit(position_noise, static_argnames="vocab_size")
draft_noise_jit = jax.jit(draft_noise, static_argnames=("first_block", "vocab_size"))


def kept_tokens(logits, temperature, top_k, top_p, min_p):
    """Tokens kept and tokens so near the edge of top-p that float32 may go either way; equal logits are kept or dropped together.

    In the order of transformers' warpers: temperature, top-k, top-p, min-p, each on what the one before it left.
    """
    scaled = logits.astype(np.float64) / temperature
    kept = np.ones(scaled.size, bool)
    if top_k:
        kept &= scaled >= np.sort(scaled)[::-1][min(top_k, scaled.size) - 1]
    probs = np.where(kept, np.exp(scaled - scaled.max()), 0)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    near = np.zeros(scaled.size, bool)
    if top_p < 1:
        in_front = {index: before[order == index][0] for index in range(scaled.size)}
        first_of_tie = [min(in_front[other] for other in np.flatnonzero(scaled == scaled[index])) for index in range(scaled.size)]
        near = np.abs(np.asarray(first_of_tie) - top_p) < 1e-5
        kept &= (np.asarray(first_of_tie) < top_p) | (first_of_tie == np.min(first_of_tie))
    probs = np.where(kept, probs, 0)
    return kept & (probs >= min_p * probs.max()), near


def drawn(seed, *, is_tied):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.standard_normal((ROWS, PLACES, VOCAB))).astype(np.float32)
    if is_tied:
        logits = np.round(logits)
    return rng, logits


@pytest.mark.parametrize("is_tied", [False, True])
def test_filters_equal_the_steps_written_out(is_tied):
    num_removed = 0
    for seed in range(10):
        rng, logits = drawn(seed, is_tied=is_tied)
        given = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 2.0], ROWS),
            "top_k": rng.choice([0, 1, 2, 5, VOCAB, 1000], ROWS),
            "top_p": rng.choice([1e-6, 0.3, 0.9, 0.999, 1.0], ROWS),
            "min_p": rng.choice([0.0, 0.02, 0.3, 1.0], ROWS),
        }
        filtered = np.asarray(filter_jit(logits, make_sampling(ROWS, **given)))
        for row in range(ROWS):
            for place in range(PLACES):
                values = {name: value[row] for name, value in given.items()}
                kept, near = kept_tokens(logits[row, place], **values)
                got = filtered[row, place] > -np.inf
                assert (got == kept)[~near].all(), values
                scaled = (logits[row, place] - logits[row, place].max()) / values["temperature"]
                np.testing.assert_allclose(filtered[row, place][got], scaled[got], rtol=1e-5)
                num_removed += int((~got).sum())
    assert num_removed > 1000


def test_no_filter_removes_nothing_and_the_best_token_always_stays():
    _, logits = drawn(3, is_tied=True)
    assert np.isfinite(filter_jit(logits, make_sampling(ROWS, temperature=0.5))).all()
    for harshest in ({"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}):
        kept = np.asarray(filter_jit(logits, make_sampling(ROWS, temperature=0.5, **harshest))) > -np.inf
        np.testing.assert_array_equal(kept, logits == logits.max(axis=-1, keepdims=True))


def test_filters_equal_transformers_warpers():
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    _, logits = drawn(17, is_tied=False)
    for temperature, top_k, top_p, min_p in [(0.7, 9, 0.9, 0.01), (1.3, 5, 0.6, 0.05), (0.5, 20, 0.99, 1e-4)]:
        scores = torch.tensor(logits.reshape(-1, VOCAB))
        warpers = (TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p))
        for warper in warpers:
            scores = warper(None, scores)
        ours = filter_jit(logits, make_sampling(ROWS, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
        expected = torch.log_softmax(scores, dim=-1).numpy().reshape(logits.shape)
        np.testing.assert_allclose(jax.nn.log_softmax(ours), expected, atol=1e-5)


def test_noise_is_the_gumbel_noise_of_the_row_key_folded_by_the_position():
    keys = row_keys(jax.random.key(5), 4)
    positions = jnp.asarray([[0, 1, 2], [7, 8, 9], [1000, 1001, 1002], [8, 3, 2**31 - 1]], jnp.int32)
    noise = noise_jit(keys, positions, vocab_size=VOCAB)
    for row in range(4):
        for place in range(3):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), row), int(positions[row, place]))
            np.testing.assert_array_equal(noise[row, place], jax.random.gumbel(key, (VOCAB,), jnp.float32))


def test_a_drafts_own_noise_is_that_of_no_position_and_no_other_block():
    keys = row_keys(jax.random.key(5), 2)
    positions = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (2, 4, 3))
    own = np.asarray(draft_noise_jit(keys, positions, first_block=1, vocab_size=VOCAB))
    target = np.asarray(noise_jit(keys, jnp.broadcast_to(jnp.arange(50, dtype=jnp.int32), (2, 50)), vocab_size=VOCAB))
    values = np.concatenate([own.reshape(-1), target.reshape(-1)])
    assert np.unique(values).size > 0.999 * values.size  # float32 repeats a few values by chance
    # the numbering of blocks is absolute, so a smaller bucket draws the same
    np.testing.assert_array_equal(own[:, 1:], draft_noise_jit(keys, positions[:, 1:], first_block=2, vocab_size=VOCAB))


def test_row_keys_are_folded_from_one_key_or_given():
    folded = row_keys(jax.random.key(3), 4)
    for row in range(4):
        assert folded[row] == jax.random.fold_in(jax.random.key(3), row)
    assert (row_keys(folded, 4) == folded).all()
    assert (row_keys(jax.random.PRNGKey(3), 4) == folded).all()
    with pytest.raises(ValueError, match=r"key must be one key or one per row \(3\); got shape \(4,\)"):
        row_keys(folded, 3)


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-42])
def test_a_tiny_temperature_is_the_argmax(temperature):
    """1e-42 is subnormal in float32, where a CPU may flush it to 0."""
    _, logits = drawn(7, is_tied=False)
    noise = noise_jit(row_keys(jax.random.key(1), ROWS), jnp.zeros((ROWS, PLACES), jnp.int32), vocab_size=VOCAB)
    places = jnp.broadcast_to(jnp.arange(PLACES, dtype=jnp.int32), (ROWS, PLACES))
    chosen = choose_jit(logits, make_sampling(ROWS, temperature=temperature, top_p=0.9), noise, places)
    np.testing.assert_array_equal(chosen.tokens, logits.argmax(axis=-1))
    np.testing.assert_array_equal(chosen.processed_log_probs, 0)


def test_rows_of_temperature_zero_are_greedy_beside_sampled_ones():
    """vllm-project/vllm#27077, sgl-project/sglang#23296, google-deepmind/gemma#562"""
    rng, logits = drawn(11, is_tied=True)
    temperature = rng.choice([0.0, 1e-30, 0.7, 1.0], ROWS)
    sampling = make_sampling(ROWS, temperature=temperature, top_k=7, top_p=0.95, min_p=0.01)
    noise = noise_jit(row_keys(jax.random.key(2), ROWS), jnp.zeros((ROWS, 5), jnp.int32) + jnp.arange(5)[None], vocab_size=VOCAB)
    places = rng.integers(5, size=(ROWS, PLACES)).astype(np.int32)
    chosen = choose_jit(logits, sampling, noise, places)
    filtered = np.asarray(filter_jit(logits, sampling))
    raw = log_softmax(logits.astype(np.float64), axis=-1)
    processed = log_softmax(filtered.astype(np.float64), axis=-1)
    for row in range(ROWS):
        for place in range(PLACES):
            token = int(chosen.tokens[row, place])
            if temperature[row] == 0:
                assert token == np.argmax(logits[row, place])
            else:
                assert token == np.argmax(filtered[row, place] + np.asarray(noise[row, places[row, place]]))
            np.testing.assert_allclose(chosen.log_probs[row, place], raw[row, place, token], atol=1e-5)
            expected = processed[row, place, token] if temperature[row] else 0
            np.testing.assert_allclose(chosen.processed_log_probs[row, place], expected, atol=1e-5)


def test_argmax_takes_the_first_of_equals_and_stays_in_range():
    x = jnp.asarray([[1.0, 3.0, 3.0], [-jnp.inf, -jnp.inf, 0.0], [-jnp.inf] * 3, [jnp.nan] * 3])
    assert argmax(x).tolist() == [1, 2, 0, 2]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more; got -0.1; use 0 for greedy decoding"),
        ({"temperature": float("nan")}, "temperature must be 0 or more; got nan"),
        ({"temperature": float("inf")}, "temperature must be 0 or more; got inf"),
        ({"temperature": "warm"}, "temperature must be a number; got 'warm'"),
        ({"temperature": [0.5, 0.5, 0.5]}, r"temperature must be one number or one per row \(2\); got shape \(3,\)"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]; got 0.0; use 1 to keep all tokens"),
        ({"top_p": [0.5, 1.01]}, r"top_p must lie in \(0, 1\]; got \[0.5, 1.01\]"),
        ({"top_k": -3}, "top_k must be 0 or more; got -3; use 0 to keep all tokens"),
        ({"top_k": 2.5}, "top_k must be an integer; got 2.5"),
        ({"min_p": -0.2}, r"min_p must lie in \[0, 1\]; got -0.2; use 0 to keep all tokens"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\]; got 1.5"),
    ],
)
def test_bad_sampling_values_are_refused_by_name(given, text):
    with pytest.raises(ValueError, match=text):
        make_sampling(2, **given)


@pytest.mark.parametrize(("name", "value"), [("top_k", 2**31), ("top_k", 3_000_000_000), ("temperature", 1e40)])
def test_what_the_arrays_cannot_hold_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        make_sampling(3, **{name: value})
