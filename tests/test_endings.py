"""Where and why a row ends: budgets, stop tokens at every place of a round, the cache's last slot."""

import functools

import jax
import numpy as np
import oracle
from divergence import assert_same_generation
from lossless import BEST, NEW, mixed_sampling, situation, warm_sampling
from situations import BLOCK, CACHE_LENGTH, prompts

from reanchor_jax import DecodeConfig, autoregress, generate
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.decoding.walk import LENGTH, STOP


@functools.cache
def plain_rows(name, seed):
    """Tokens of a long plain generation of the request that the tests of cuts make."""
    tokens, lengths = prompts(5, seed=seed)
    sampling = warm_sampling() if name == "flat" else mixed_sampling()
    plain = autoregress(situation(name), tokens, lengths, jax.random.key(seed), config=BEST, sampling=sampling, max_new_tokens=NEW)
    return np.asarray(plain.tokens).tolist()


def expected_rows(name, seed, stops, budgets):
    """What every row must emit and why it ends."""
    return [oracle.cut(row, stops, budget) for row, budget in zip(plain_rows(name, seed), budgets, strict=True)]


def assert_rows(got, rows):
    for row, (tokens, reason) in enumerate(rows):
        size = got.tokens.shape[1]
        assert int(got.lengths[row]) == len(tokens)
        assert int(got.finish_reasons[row]) == reason
        assert got.tokens[row].tolist() == tokens + [0] * (size - len(tokens))
        assert not np.asarray(got.log_probs[row, len(tokens) :]).any()


def cut_generation(name, seed, **request):
    """The request whose uncut tokens are plain_rows(name, seed)."""
    tokens, lengths = prompts(5, seed=seed)
    sampling = warm_sampling() if name == "flat" else mixed_sampling()
    request = {"config": BEST, "sampling": sampling, "max_new_tokens": NEW, **request}
    return generate(situation(name), tokens, lengths, jax.random.key(seed), **request)


def test_every_number_of_new_tokens_cuts_the_same_text():
    for count in range(1, NEW + 1):
        name = "often_right" if count % 8 == 1 else "flat"
        got = cut_generation(name, 13, max_new_tokens=count)
        assert_rows(got, expected_rows(name, 13, [], [count] * 5))
        assert (np.asarray(got.finish_reasons) == LENGTH).all()
        assert got.tokens.shape == (5, count)
        np.testing.assert_array_equal(np.asarray(got.info.num_emitted).sum(axis=0), count - 1)


def test_budgets_are_each_rows_own():
    budgets = [1, 2, 40, 7, 23]
    assert_rows(cut_generation("flat", 17, budgets=np.asarray(budgets)), expected_rows("flat", 17, [], budgets))


def test_generation_does_not_run_on_behind_a_stop_token_accepted_inside_a_block():
    """huggingface/transformers#47912: at every depth, as bonus and as the prefill token"""
    seen = set()
    whole = cut_generation("flat", 19)
    for stop in range(61):
        rows = expected_rows("flat", 19, [stop, 60], [NEW] * 5)
        assert_rows(cut_generation("flat", 19, stop_token_ids=[stop, 60]), rows)
        seen |= {place_in_round(whole.info, row, len(kept) - 1) for row, (kept, reason) in enumerate(rows) if reason == STOP}
    assert seen >= {"prefill", "bonus", *range(1, BLOCK), "beyond the block"}


def test_a_row_does_not_end_by_its_length_where_a_stop_token_came_first():
    """sgl-project/sglang#31599: the earliest event is the reason, and at the last place of a budget the stop"""
    text = plain_rows("flat", 19)[0]
    place = next(index for index, token in enumerate(text) if index > 5 and token not in text[:index])
    for budget, reason in ((place, LENGTH), (place + 1, STOP), (place + 2, STOP)):
        got = cut_generation("flat", 19, stop_token_ids=[text[place]], budgets=np.full(5, budget))
        assert int(got.finish_reasons[0]) == reason
        assert got.tokens[0, : int(got.lengths[0])].tolist() == text[: min(budget, place + 1)]
        assert not np.asarray(got.tokens[0, min(budget, place + 1) :]).any()


def place_in_round(info, row, place):
    """Where the token of an output place came from: prefill, bonus, or the depth of the accepted node that carries it."""
    end = 1
    if place == 0:
        return "prefill"
    for emitted, accepted in zip(
        np.asarray(info.num_emitted)[:, row].tolist(), np.asarray(info.num_accepted)[:, row].tolist(), strict=True
    ):
        if place < end + emitted:
            depth = place - end + 1
            return "bonus" if depth == accepted + 1 else depth if depth < BLOCK else "beyond the block"
        end += emitted
    raise AssertionError(f"place {place} was never emitted")


def test_a_row_may_fill_the_cache_to_its_last_place():
    models = situation("flat")
    lengths = np.asarray([CACHE_LENGTH - 1, CACHE_LENGTH - NEW, 1, 50, 30], np.int32)
    tokens = np.random.default_rng(1).integers(61, size=(5, CACHE_LENGTH)).astype(np.int32)
    tokens[np.arange(CACHE_LENGTH)[None] >= lengths[:, None]] = 0
    request = {"sampling": warm_sampling(), "max_new_tokens": CACHE_LENGTH - 1, "budgets": CACHE_LENGTH - lengths}
    keys = row_keys(jax.random.key(29), 5)
    got = generate(models, tokens, lengths, keys, config=BEST, **request)
    roomy = DecodeConfig.autoregressive(cache_length=4 * CACHE_LENGTH)
    expected = generate(models, tokens, lengths, keys, config=roomy, **request)
    assert_same_generation(models, tokens, lengths, keys, request["sampling"], got, expected)
    np.testing.assert_array_equal(got.lengths, CACHE_LENGTH - lengths)
