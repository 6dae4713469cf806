"""Calibration: errors equal a slow count, known temperatures are found, and and recorded blocks are judged by the head."""

import jax
import numpy as np
import pytest
from tiny import random_models, tiny_family_config, tiny_llama_config

from reanchor_jax.decoding.confidence import confidences
from reanchor_jax.models.drafter import Models
from reanchor_jax.training.calibration import _log_odds, calibrate, calibration_error, fit_temperatures
from reanchor_jax.training.packed import packed_blocks
from reanchor_jax.training.rollouts import record_blocks


def drafts(count: int, num_drafts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """True log-odds of every draft, and how many were accepted in turn."""
    rng = np.random.default_rng(seed)
    log_odds = rng.normal(1.0, 1.5, size=(count, num_drafts))
    is_right = rng.random(log_odds.shape) < 1 / (1 + np.exp(-log_odds))
    return log_odds, np.cumprod(is_right, axis=1).sum(axis=1)


def test_the_calibration_error_is_the_mean_difference_of_bins():
    rng = np.random.default_rng(1)
    chances = np.concatenate([rng.random(101), [0.0, 1.0, 0.05, 0.95]])
    is_true = rng.random(chances.size) < chances**2
    expected = 0.0
    for index in range(20):
        inside = [n for n, chance in enumerate(chances) if min(int(chance * 20), 19) == index]
        if inside:
            expected += len(inside) / chances.size * abs(np.mean(chances[inside]) - np.mean(is_true[inside]))
    assert calibration_error(chances, is_true) == pytest.approx(expected, abs=1e-12)
    assert calibration_error(np.asarray([0.26, 0.26, 0.26, 0.26]), np.asarray([True, False, False, False])) == pytest.approx(0.01)


def test_log_odds_that_were_scaled_are_scaled_back_one_token_after_another():
    log_odds, num_accepted = drafts(20_000, 4)
    scales = np.asarray([2.0, 0.5, 3.0, 1.0])
    found = fit_temperatures(log_odds * scales, num_accepted)
    # the share accepted of 20,000 is known to 0.4 %, so a temperature to a few percent; later tokens are reached less often
    np.testing.assert_allclose(found.temperatures, scales, rtol=0.2)
    assert found.num_blocks == 20_000
    assert np.all(found.error_after < 0.012)
    assert np.all(found.error_before[:3] > 0.03)


def test_well_calibrated_log_odds_keep_about_their_temperature_and_the_first_tokens_error_does_not_rise():
    log_odds, num_accepted = drafts(3000, 3, seed=2)
    found = fit_temperatures(log_odds, num_accepted)
    np.testing.assert_allclose(found.temperatures, 1.0, rtol=0.35)
    assert found.error_after[0] <= found.error_before[0]


def test_no_block_and_no_confidence_head_are_refused():
    with pytest.raises(ValueError, match="no block was drafted to its end"):
        fit_temperatures(np.zeros((0, 3)), np.zeros(0, int))
    target = tiny_llama_config()
    models = random_models(target, tiny_family_config("dspark", target), seed=4)
    with pytest.raises(ValueError, match="no confidence head"):
        calibrate(Models(target=models.target, drafter=None), np.ones((2, 9), np.int32), np.full(2, 3, np.int32))


@pytest.mark.slow
def test_confidences_of_recorded_blocks_are_the_heads_own_and_all_whole_blocks_are_fitted():
    target = tiny_llama_config()
    models = random_models(target, tiny_family_config("dspark", target), seed=5)
    drafter = models.drafter
    assert drafter is not None
    prompts = np.random.default_rng(0).integers(target["vocab_size"], size=(3, 31)).astype(np.int32)
    recorded = record_blocks(models, prompts, np.asarray([4, 7, 9], np.int32))
    found = 1 / (1 + np.exp(-np.asarray(_log_odds(*models, recorded.tokens, recorded.anchors, recorded.proposals))))

    @jax.jit
    def judged(models, tokens, anchors, previous):
        return confidences(models.drafter, packed_blocks(models.drafter, models.target, tokens, anchors).states, previous)

    anchors = np.minimum(recorded.anchors, recorded.tokens.shape[1] - 1)
    before = np.take_along_axis(recorded.tokens, anchors, axis=1)[..., None]
    expected = judged(models, recorded.tokens, anchors, np.concatenate([before, recorded.proposals[..., :-1]], axis=-1))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    calibration = jax.tree.map(np.asarray, calibrate(models, prompts, np.asarray([4, 7, 9], np.int32)))
    assert calibration.num_blocks == int((recorded.num_blocks - 1).sum())
    # row by row: each whole block's log-odds beside its own accepted drafts
    odds = np.asarray(_log_odds(*models, recorded.tokens, recorded.anchors, recorded.proposals))
    whole = [(row, block) for row in range(3) for block in range(int(recorded.num_blocks[row]) - 1)]
    by_hand = fit_temperatures(
        np.stack([odds[row, block] for row, block in whole]), np.asarray([recorded.num_accepted[row, block] for row, block in whole])
    )
    np.testing.assert_array_equal(calibration.temperatures, by_hand.temperatures)
    scales = tuple(0.5 + 0.25 * index for index in range(drafter.config.num_drafts))
    confidence = {"confidence_temperatures": list(scales)}
    config = tiny_family_config("dspark", target)
    config["dflash_config"] = {**config.get("dflash_config", {}), **confidence}
    scaled = random_models(target, config, seed=5)
    assert scaled.drafter.confidence.config.temperatures == scales
    again = np.asarray(_log_odds(*scaled, recorded.tokens, recorded.anchors, recorded.proposals))
    np.testing.assert_allclose(again, odds, rtol=1e-4, atol=1e-5)  # at temperature 1, whatever the drafter divides by
