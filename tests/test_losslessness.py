"""Every method emits what `autoregress` emits with the same key: tokens, log-probabilities, finish reasons, whatever the drafter does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from divergence import Divergence, assert_same_generation, find_divergences
from situations import BLOCK, CACHE_LENGTH, FAVOURITE, always_wrong, flat, often_right, prompts, small_config, small_models
from tiny import FAMILIES

from reanchor_jax import DecodeConfig, autoregress, generate, make_sampling, summarize
from reanchor_jax.config import DRAFT_CHOICES, RETAIN_POLICIES
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.decoding.walk import LENGTH, STOP

NEW = 40
SHORT = 24  # where rounds that accept nothing take the time
TEMPERATURES, TOP_PS = (0.0, 0.7, 1.0), (1.0, 0.9)
SITUATIONS = {"random": lambda models: models, "flat": flat, "often_right": often_right, "always_wrong": always_wrong}
# every draft choice and retention policy once; every combination is left to the slow test
QUICK = [("llama", "deepest", "argmax"), ("llama", "both", "coupled"), ("qwen3", "none", "independent"), ("qwen3", "baseline", "argmax")]
BEST = small_config("both", "coupled")


def mixed_sampling():
    """Five rows: greedy beside sampled ones, with and without filters."""
    return make_sampling(5, temperature=[0.0, 0.7, 0.7, 1.0, 1.0], top_p=[1.0, 1.0, 0.9, 1.0, 0.9])


def warm_sampling():
    """Five sampled rows: with flat logits and coupled drafts they accept nearly everything, so a generation takes few rounds."""
    return make_sampling(5, temperature=[1.0, 0.8, 1.0, 1.2, 1.0], top_p=[1.0, 1.0, 0.9, 1.0, 0.8])


@functools.cache
def situation(name, family="llama", seed=3):
    return SITUATIONS[name](small_models(seed, family=family))


def expect_equal(models, config, *, num_rows=5, seed=0, sampling=None, **request):
    """Run both ways, compare, and return the speculative result."""
    tokens, lengths = prompts(num_rows, seed=seed)
    sampling = mixed_sampling() if sampling is None else sampling
    keys = row_keys(jax.random.key(seed), num_rows)
    request = {"config": config, "sampling": sampling, "max_new_tokens": NEW, **request}
    got = generate(models, tokens, lengths, keys, **request)
    assert_same_generation(models, tokens, lengths, keys, sampling, got, autoregress(models, tokens, lengths, keys, **request))
    return got


@pytest.mark.parametrize(("family", "retain", "draft_choice"), QUICK)
def test_generate_equals_autoregress_with_the_same_key(family, retain, draft_choice):
    config = small_config(retain, draft_choice)
    infos = {}
    for name in SITUATIONS:
        seeds = range(2 if name == "often_right" else 1)
        infos[name] = [expect_equal(situation(name, family), config, seed=seed, max_new_tokens=SHORT).info for seed in seeds]
    histograms = {name: summarize(info, block_size=BLOCK).histogram for name, info in infos.items()}
    # the equality means something only where drafts were accepted, and rejected
    assert histograms["often_right"][0] > 0
    assert sum(histograms["often_right"][2:]) > 0
    assert sum(histograms["always_wrong"][1:]) == 0
    if retain != "none":
        assert any(np.asarray(info.num_attached).any() for info in infos["random"])


@pytest.mark.parametrize(
    ("family", "retain", "draft_choice"),
    [
        ("gemma4", "both", "argmax"),
        ("domino", "both", "coupled"),
        pytest.param("dspark", "deepest", "independent", marks=pytest.mark.slow),
        pytest.param("dflare", "baseline", "argmax", marks=pytest.mark.slow),
        pytest.param("dspark_dflare", "both", "independent", marks=pytest.mark.slow),
        ("gemma4_dspark", "deepest", "coupled"),
    ],
)
def test_targets_and_drafters_of_every_family_equal_autoregress(family, retain, draft_choice):
    """Prompts of 1 to 20 tokens and windows of 9 and 3: the edges of the windows fall everywhere in prompt and generation."""
    config = small_config(retain, draft_choice)
    infos = [
        expect_equal(situation(name, family), config, seed=seed, max_new_tokens=SHORT).info for seed, name in enumerate(("random", "flat"))
    ]
    histogram = summarize(infos, block_size=BLOCK).histogram
    assert histogram[0] > 0
    assert sum(histogram[1:]) > 0


@pytest.mark.parametrize(
    "cut",
    [{"min_confidence": 0.4}, pytest.param({"steps_per_second": (9.0, 8.0, 7.0, 6.5, 6.0, 5.5, 5.0, 4.0, 3.0)}, marks=pytest.mark.slow)],
    ids=["threshold", "cost"],
)
def test_blocks_cut_by_confidence_leave_the_output_equal(cut):
    models, config = situation("flat", "dspark"), small_config("both", "coupled")
    whole, shortened = (
        expect_equal(models, dataclasses.replace(config, **given), seed=3, max_new_tokens=SHORT).info for given in ({}, cut)
    )
    assert np.asarray(shortened.num_nodes).sum() < np.asarray(whole.num_nodes).sum()


@pytest.mark.slow
@pytest.mark.parametrize("target_family", ["llama", "qwen3", "gemma4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_autoregress_on_every_target(family, target_family):
    """Greedy and sampled rows of unequal length side by side."""
    models = small_models(5, family=family, target_family=target_family)
    for one in (models, flat(models)):
        expect_equal(one, BEST, seed=8, max_new_tokens=SHORT)


PROPOSALS = [
    {"attach": "longest_prefix", "retain": "suffix"},
    {"attach": "random", "retain": "descendants", "extent": "in_block"},
    {"attach": "original_offset", "extent": "extension"},
    {"attach": "original_offset_match", "draft_choice": "independent"},
    {"is_second_tried": True, "draft_choice": "coupled"},
]
TREES = [
    {"expand": "merge", "draft_choice": "coupled"},
    {"expand": "marginal", "retain": "none", "max_offsets": 0, "draft_choice": "independent"},
    {"expand": "merge", "draft_choice": "independent", "num_nodes": BLOCK},
    {"expand": "merge", "retain": "descendants", "reliability": 1.0},
    {"expand": "marginal", "retain": "none", "max_offsets": 0, "draft_choice": "coupled", "num_ranks": 2},
]


@pytest.mark.parametrize("tree", [pytest.param(one, marks=[pytest.mark.slow] * (index > 1)) for index, one in enumerate(TREES)])
def test_grown_trees_leave_the_output_equal(tree):
    config = dataclasses.replace(small_config("both", "argmax"), **{"num_nodes": 20, **tree})
    for name in ("flat", "often_right"):
        info = expect_equal(situation(name), config, seed=9, max_new_tokens=SHORT).info
        assert (np.asarray(info.num_accepted) > 0).any()
        assert np.asarray(info.num_attached).any() == (config.retain != "none")


@pytest.mark.parametrize("proposal", [pytest.param(one, marks=[pytest.mark.slow] * (index > 1)) for index, one in enumerate(PROPOSALS)])
def test_every_way_to_attach_and_retain_leaves_the_output_equal(proposal):
    config = dataclasses.replace(small_config("both", "argmax"), max_offsets=0, num_nodes=20, **proposal)
    for name in ("flat", "often_right"):
        info = expect_equal(situation(name), config, seed=4, max_new_tokens=SHORT).info
        assert np.asarray(info.num_attached).any()


@pytest.mark.slow
@pytest.mark.parametrize("draft_choice", DRAFT_CHOICES)
@pytest.mark.parametrize("retain", RETAIN_POLICIES)
@pytest.mark.parametrize("family", ["gemma4", *FAMILIES])
def test_every_combination_of_every_family_equals_autoregress(family, retain, draft_choice):
    for name in ("random", "flat"):
        for seed in range(40, 44):
            expect_equal(situation(name, family), small_config(retain, draft_choice), seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("draft_choice", DRAFT_CHOICES)
@pytest.mark.parametrize("retain", RETAIN_POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_combination_equals_autoregress(family, retain, draft_choice):
    for name in SITUATIONS:
        for seed in range(20, 30):
            expect_equal(situation(name, family), small_config(retain, draft_choice), seed=seed)


def test_one_row_equals_autoregress_at_every_temperature_and_top_p():
    for temperature in TEMPERATURES:
        for top_p in TOP_PS:
            sampling = make_sampling(1, temperature=temperature, top_p=top_p)
            expect_equal(situation("often_right"), BEST, num_rows=1, seed=5, sampling=sampling, max_new_tokens=SHORT)


def test_filters_of_every_kind_leave_the_output_equal():
    sampling = make_sampling(
        5, temperature=[1e-30, 0.5, 1.0, 1.5, 2.0], top_k=[0, 3, 9, 0, 40], top_p=[1, 1, 0.8, 1, 0.99], min_p=[0, 0, 0, 0.1, 0.01]
    )
    for name in ("random", "flat", "often_right"):
        expect_equal(situation(name), BEST, seed=6, sampling=sampling, max_new_tokens=SHORT)


def test_the_adversarial_drafter_is_always_wrong():
    """At every temperature: it drafts one token and the target emits any other."""
    got = expect_equal(situation("always_wrong"), BEST, seed=7)
    assert not (np.asarray(got.tokens) == FAVOURITE).any()
    assert int(got.num_rounds) == NEW - 1
    assert np.asarray(got.info.num_accepted).max() == 0


def test_a_shifted_block_extends_the_accepted_path_beyond_a_block():
    infos = [expect_equal(situation("flat"), BEST, seed=seed, sampling=warm_sampling()).info for seed in range(4)]
    summary = summarize(infos, block_size=BLOCK)
    assert len(summary.histogram) > BLOCK
    assert summary.shifted_rate > 0
    assert summary.num_dropped > 0


def test_rows_of_a_batch_equal_each_row_alone():
    models, sampling = situation("flat"), warm_sampling()
    tokens, lengths = prompts(5, seed=11)
    keys = row_keys(jax.random.key(11), 5)
    budgets = np.asarray([40, 3, 17, 1, 29], np.int32)
    stops = [5, 44]
    batch = generate(
        models,
        tokens,
        lengths,
        jax.random.key(11),
        config=BEST,
        sampling=sampling,
        max_new_tokens=NEW,
        stop_token_ids=stops,
        budgets=budgets,
    )
    assert len(set(np.asarray(batch.lengths).tolist())) > 2
    for row in range(5):
        own = jax.tree.map(lambda values, row=row: values[row : row + 1], sampling)
        alone = generate(
            models,
            tokens[row : row + 1],
            lengths[row : row + 1],
            keys[row : row + 1],
            config=BEST,
            sampling=own,
            max_new_tokens=NEW,
            stop_token_ids=stops,
            budgets=budgets[row : row + 1],
        )
        expected = jax.tree.map(lambda values, row=row: values[row : row + 1], batch._replace(info=None, num_rounds=None))
        assert_same_generation(models, tokens[row : row + 1], lengths[row : row + 1], keys[row : row + 1], own, alone, expected)
        # rounds too: nobody waits for a neighbour with fewer tokens, nobody drafts more for one with more offsets
        for name in ("num_emitted", "num_accepted", "num_nodes", "num_offsets", "num_attached", "num_dropped", "is_shifted"):
            np.testing.assert_array_equal(getattr(alone.info, name)[:, 0], getattr(batch.info, name)[:, row], err_msg=name)


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


def test_stop_tokens_end_a_row_at_every_depth_as_bonus_and_as_the_prefill_token():
    seen = set()
    whole = cut_generation("flat", 19)
    for stop in range(61):
        rows = expected_rows("flat", 19, [stop, 60], [NEW] * 5)
        assert_rows(cut_generation("flat", 19, stop_token_ids=[stop, 60]), rows)
        seen |= {place_in_round(whole.info, row, len(kept) - 1) for row, (kept, reason) in enumerate(rows) if reason == STOP}
    assert seen >= {"prefill", "bonus", *range(1, BLOCK), "beyond the block"}


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


def test_the_comparison_finds_and_grades_a_difference():
    """The checks above rest on it: a changed token is found, with the margin by which it lost."""
    models, sampling = situation("random"), mixed_sampling()
    tokens, lengths = prompts(5, seed=37)
    keys = row_keys(jax.random.key(37), 5)
    plain = autoregress(models, tokens, lengths, keys, config=BEST, sampling=sampling, max_new_tokens=NEW)
    wrong = (int(plain.tokens[2, 6]) + 1) % 61
    changed = plain._replace(tokens=plain.tokens.at[2, 6].set(wrong))
    (found,) = find_divergences(models, tokens, lengths, keys, sampling, changed, plain)
    assert found[:4] == (2, 6, wrong, int(plain.tokens[2, 6]))
    assert found.margin > 1e-3
    assert not found.is_near_tie
    assert Divergence(row=0, place=0, token=1, expected=2, margin=5e-5).is_near_tie
    shorter = plain._replace(lengths=plain.lengths.at[4].add(-1))
    assert [one.row for one in find_divergences(models, tokens, lengths, keys, sampling, shorter, plain)] == [4]
    with pytest.raises(AssertionError, match=r"difference: Divergence\(row=2, place=6"):
        assert_same_generation(models, tokens, lengths, keys, sampling, changed, plain)
    assert_same_generation(models, tokens, lengths, keys, sampling, plain, jax.tree.map(jnp.asarray, plain))
