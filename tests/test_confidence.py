"""Cutting blocks by confidence: against every possible number of tokens, the worked case of the paper, and the published cost tables."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from situations import small_models

from reanchor_jax import DecodeConfig, generate
from reanchor_jax.decoding.confidence import above_threshold, read_cost_table, worth_their_cost

ROWS, BLOCKS, DRAFTS = 2, 3, 4


def test_a_block_ends_before_the_first_token_below_the_threshold():
    chances = jnp.asarray([[[0.9, 0.8, 0.7, 0.95], [0.4, 0.9, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]])
    assert above_threshold(chances, 0.75).tolist() == [[3, 1, 5]]


def reach_of(chances, sites):
    """Chance of every token with its whole path, by loops; 0 where the block has no site."""
    found = {}
    for row in range(ROWS):
        for block in range(BLOCKS):
            reach = 1.0 if sites[row][block] >= 0 else 0.0
            for index in range(max(sites[row][block], 0)):
                reach *= chances[row, 0, index]
            for index in range(DRAFTS):
                reach *= chances[row, block, index]
                found[row, block, index] = reach
    return found


def test_the_number_of_tokens_is_the_best_of_all_numbers():
    rng = np.random.default_rng(3)
    # falling profiles with steps, as buckets make them; each is a program of its own
    profiles = [np.repeat(np.sort(rng.uniform(1, 9, size=5))[::-1], 6)[:size] for size in (30, 9, 30, 9)]
    count = jax.jit(worth_their_cost, static_argnums=3)
    for case in range(60):
        chances = rng.uniform(size=(ROWS, BLOCKS, DRAFTS)).astype(np.float32) ** 0.3
        sites = rng.integers(-1, DRAFTS + 1, size=(ROWS, BLOCKS))
        sites[:, 0] = 0
        speeds = profiles[case % len(profiles)]
        reach = reach_of(chances, sites)
        order = sorted(reach, key=lambda place: -reach[place])
        rates = [
            (ROWS + sum(reach[place] for place in order[:number])) * speeds[min(ROWS + number, len(speeds)) - 1]
            for number in range(len(order) + 1)
        ]
        taken = [place for place in order[: int(np.argmax(rates))] if reach[place] > 0]
        kept = np.asarray(count(chances, sites.astype(np.int32), np.ones(ROWS, bool), tuple(speeds.tolist())))
        for row in range(ROWS):
            for block in range(BLOCKS):
                number = sum(place[:2] == (row, block) for place in taken)
                assert kept[row, block] == (1 + number if number or block == 0 else 0)


def test_a_finished_row_changes_nothing_for_the_others():
    chances = jnp.asarray([[[0.6, 0.5, 0.4]], [[0.99, 0.99, 0.99]]])
    speeds = (9.0, 8.0, 6.5, 5.0, 4.0, 3.0, 2.0, 1.0)
    alone = worth_their_cost(chances[:1], jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool), speeds)
    beside = worth_their_cost(chances, jnp.zeros((2, 1), jnp.int32), jnp.asarray([True, False]), speeds)
    assert beside.tolist() == [*alone.tolist(), [1]]
    assert 1 < alone[0, 0] < 4


@pytest.mark.parametrize(("second", "expected"), [(0.9, 3), (0.0, 1)])
def test_the_papers_worked_case_steps_over_the_staircase(second, expected):
    """One row, two drafts, a1 = 0.8, c2 = 0.9 or 0: 1 x 1.0, 1.8 x 0.5, 2.52 x 0.45. Without a second chance, drafting nothing is best."""
    chances = jnp.asarray([[[0.8, second]]])
    assert worth_their_cost(chances, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, bool), (1.0, 0.5, 0.45)).tolist() == [[expected]]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"schema_version": 1, "steps_per_second": {"1": 9.0, "3": 5.0}}, (9.0, 9.0, 5.0, 5.0)),
        ({"sample_batch_tokens": [1, 2, 4], "sample_steps_per_sec": [8.0, 6.0, 5.0], "max_batch_tokens": 4}, (8.0, 6.0, 6.0, 5.0)),
        (
            {"bias_seconds": 0.1, "bs_probes": [1, 3], "alpha_seconds": [0.1, 0.3], "m_probes": [1, 3], "theta_seconds": [0.05, 0.25]},
            (1 / 0.35, 1 / 0.45, 1 / 0.55, 1 / 0.55),
        ),
    ],
)
def test_published_cost_tables_are_read(tmp_path, table, expected):
    (tmp_path / "costs.json").write_text(json.dumps(table))
    assert read_cost_table(tmp_path / "costs.json", num_rows=2, max_tokens=4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no cost table that can be used"),
        ('{"steps_per_second": [1, 2]}', "is no cost table that can be used"),
        ('{"bias_seconds": "x", "bs_probes": [1], "alpha_seconds": [1], "m_probes": [1], "theta_seconds": [1]}', "is no cost table that"),
        ("{}", "is no cost table; known are"),
        ('{"sample_batch_tokens": [2, 1], "sample_steps_per_sec": [1, 1]}', "must rise strictly"),
        ('{"sample_batch_tokens": [], "sample_steps_per_sec": []}', "sample_batch_tokens must be a list of numbers"),
        ('{"steps_per_second": {"1": 0}}', "every speed must be a positive number"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_cost_table(tmp_path / "costs.json")


def test_settings_that_cannot_be_are_refused():
    for settings, message in (
        ({"min_confidence": 1.0}, r"min_confidence must lie in \[0, 1\)"),
        ({"steps_per_second": (1.0, 0.0)}, "steps_per_second must be a tuple of positive numbers"),
        ({"steps_per_second": (1.0,), "min_confidence": 0.5}, "set one of them"),
        ({"is_speculative": False, "min_confidence": 0.5}, "drafts nothing to cut"),
        ({"min_confidence": 0.5, "retain": "both", "is_second_tried": True}, "value a shifted block by the baseline token at its site"),
        ({"steps_per_second": (1.0,), "retain": "both", "attach": "original_offset"}, "value a shifted block by the baseline token"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodeConfig(**settings)
    with pytest.raises(ValueError, match="need a drafter with a confidence head"):
        generate(small_models(3), [[1, 2]], [2], jax.random.key(0), config=DecodeConfig(min_confidence=0.5), max_new_tokens=2)
