"""Losslessness where drafts are good: the embedded pair, in which most tokens come out of an accepted path."""

import functools

import jax
import numpy as np
import pytest
from divergence import assert_same_generation

from reanchor_jax import DecodeConfig, autoregress, generate, load_pair, make_sampling, pairs, summarize
from reanchor_jax.decoding.config import DRAFT_CHOICES, RETAIN_POLICIES
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.text import encode, load_tokenizer

NAME = "stories260k"
NEW = 32
BEGINNINGS = [
    "Once upon a time, there was a little girl named Lily.",
    "Tom had a red ball. He",
    "One day, a big dog",
    "The sun was",
    "Sara and Ben like to play in the park. They see a",
]


@functools.cache
def pair():
    return load_pair(NAME, dtype="float32")


def prompts():
    tokenizer = load_tokenizer(pairs.path(NAME))
    ids = [encode(tokenizer, text) for text in BEGINNINGS]
    lengths = np.asarray([len(row) for row in ids], np.int32)
    tokens = np.zeros((len(ids), lengths.max()), np.int32)
    for row, values in enumerate(ids):
        tokens[row, : len(values)] = values
    return tokens, lengths


def expect_equal(retain, draft_choice, *, temperature, top_p=1.0, seed=0):
    room = {} if retain == "none" else {"max_offsets": 7, "num_nodes": 40}
    config = DecodeConfig(retain=retain, draft_choice=draft_choice, cache_length=128, block_buckets=(), node_buckets=(), **room)
    tokens, lengths = prompts()
    keys = row_keys(jax.random.key(seed), len(tokens))
    sampling = make_sampling(len(tokens), temperature=temperature, top_p=top_p)
    request = {"config": config, "sampling": sampling, "max_new_tokens": NEW}
    got = generate(pair(), tokens, lengths, keys, **request)
    assert_same_generation(pair(), tokens, lengths, keys, sampling, got, autoregress(pair(), tokens, lengths, keys, **request))
    return summarize([got.info], block_size=pair().drafter.config.block_size)


def test_greedy_and_sampled_rows_equal_autoregress_on_accepted_drafts():
    summary = expect_equal("both", "coupled", temperature=[0.0, 0.0, 0.0, 0.7, 1.0], top_p=[1.0, 1.0, 1.0, 0.9, 1.0])
    assert summary.tau > 2.5
    assert summary.shifted_rate > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("draft_choice", DRAFT_CHOICES)
@pytest.mark.parametrize("retain", RETAIN_POLICIES)
def test_every_combination_equals_autoregress(retain, draft_choice):
    for seed in range(3):
        for temperature in (0.0, 0.7, 1.0):
            for top_p in (1.0, 0.9):
                expect_equal(retain, draft_choice, temperature=temperature, top_p=top_p, seed=seed)


@pytest.mark.slow
def test_states_reused_raise_the_tokens_of_a_round():
    taus = [expect_equal(retain, "argmax", temperature=0.0).tau for retain in ("none", "baseline", "both")]
    assert taus[0] < taus[1] <= taus[2]
