"""Every method emits what `autoregress` emits with the same key: tokens, log-probabilities, finish reasons, whatever the drafter does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from divergence import Divergence, assert_same_generation, find_divergences
from lossless import BEST, NEW, SHORT, SITUATIONS, expect_equal, mixed_sampling, situation, warm_sampling
from situations import BLOCK, FAVOURITE, flat, prompts, small_config, small_models
from tiny import FAMILIES, UNPUBLISHED

from reanchor_jax import autoregress, generate, make_sampling, summarize
from reanchor_jax.decoding.config import DRAFT_CHOICES, RETAIN_POLICIES
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.decoding.walk import LENGTH, STOP

TEMPERATURES, TOP_PS = (0.0, 0.7, 1.0), (1.0, 0.9)
# every draft choice once; every combination is left to the slow test
QUICK = [("llama", "both", "coupled"), ("qwen3", "none", "independent"), ("qwen3", "baseline", "argmax")]


@pytest.mark.parametrize(("family", "retain", "draft_choice"), QUICK)
def test_generate_equals_autoregress_with_the_same_key(family, retain, draft_choice):
    """z-lab/dflash#74: drafts chosen at another temperature, or with other noise, change no law"""
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
        pytest.param("gemma4_dspark", "deepest", "coupled", marks=pytest.mark.slow),
        ("xpress_dblast", "both", "independent"),
        pytest.param("xpress", "baseline", "coupled", marks=pytest.mark.slow),
        pytest.param("dblast", "both", "independent", marks=pytest.mark.slow),
    ],
)
def test_targets_and_drafters_of_every_family_equal_autoregress(family, retain, draft_choice):
    """Prompts of 1 to 20 tokens and windows of 9 and 3: the edges of the windows fall everywhere in prompt and generation."""
    config = small_config(retain, draft_choice)
    infos = [
        expect_equal(situation(name, family, seed=6), config, seed=seed, max_new_tokens=SHORT).info
        for seed, name in enumerate(("random", "flat"))
    ]
    histogram = summarize(infos, block_size=BLOCK).histogram
    assert histogram[0] > 0
    assert sum(histogram[1:]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("target_family", ["llama", "qwen3", "gemma4"])
@pytest.mark.parametrize("family", [*FAMILIES, *UNPUBLISHED])
def test_every_family_equals_autoregress_on_every_target(family, target_family):
    """Greedy and sampled rows of unequal length side by side."""
    models = small_models(5, family=family, target_family=target_family)
    for one in (models, flat(models)):
        expect_equal(one, BEST, seed=8, max_new_tokens=SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("draft_choice", DRAFT_CHOICES)
@pytest.mark.parametrize("retain", RETAIN_POLICIES)
@pytest.mark.parametrize("family", ["gemma4", *FAMILIES, *UNPUBLISHED])
def test_every_combination_of_every_family_equals_autoregress(family, retain, draft_choice):
    for name in ("random", "flat"):
        expect_equal(situation(name, family), small_config(retain, draft_choice), seed=40)


@pytest.mark.slow
@pytest.mark.parametrize("draft_choice", DRAFT_CHOICES)
@pytest.mark.parametrize("retain", RETAIN_POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_combination_equals_autoregress(family, retain, draft_choice):
    for name in SITUATIONS:
        for seed in range(20, 22):
            expect_equal(situation(name, family), small_config(retain, draft_choice), seed=seed)


@pytest.mark.slow
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


TREE = dataclasses.replace(BEST, expand="merge", num_nodes=20)


@pytest.mark.slow
@pytest.mark.parametrize("config", [BEST, TREE], ids=["paths", "tree"])
def test_rows_of_a_batch_equal_each_row_alone(config):
    """Eight rows of unequal prompts, temperatures and budgets; one ends at its prefill token by a stop, one by its budget.

    huggingface/transformers#32165, SafeAILab/EAGLE#250, unslothai/unsloth#9708
    """
    models, num_rows = situation("flat"), 8
    sampling = make_sampling(num_rows, temperature=[1.0, 0.8, 1.0, 1.2, 1.0, 0.0, 1.0, 0.5], top_p=[1, 1, 0.9, 1, 0.8, 1, 1, 0.7])
    tokens, lengths = prompts(num_rows, seed=11)
    keys = row_keys(jax.random.key(11), num_rows)
    budgets = np.asarray([40, 3, 17, 1, 29, 40, 8, 40], np.int32)
    request = {"config": config, "sampling": sampling, "max_new_tokens": NEW, "budgets": budgets}
    begun = autoregress(models, tokens, lengths, keys, **{**request, "budgets": np.ones(num_rows, np.int32)}).tokens[:, 0]
    stops = [int(begun[6]), 44]
    assert (np.asarray(begun) == stops[0]).sum() == 1
    batch = generate(
        models,
        tokens,
        lengths,
        jax.random.key(11),
        stop_token_ids=stops,
        **request,
    )
    assert len(set(np.asarray(batch.lengths).tolist())) > 3
    assert (int(batch.lengths[6]), int(batch.finish_reasons[6])) == (1, STOP)
    assert (int(batch.lengths[3]), int(batch.finish_reasons[3])) == (1, LENGTH)
    assert (np.asarray(batch.lengths) == NEW).any()
    for row in range(num_rows):
        own = jax.tree.map(lambda values, row=row: values[row : row + 1], sampling)
        alone = generate(
            models,
            tokens[row : row + 1],
            lengths[row : row + 1],
            keys[row : row + 1],
            config=config,
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
    # a log-probability that no edge of a filter explains is a difference
    moved = plain._replace(processed_log_probs=plain.processed_log_probs.at[2, 6].add(-0.009))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_generation(models, tokens, lengths, keys, sampling, moved, plain)
