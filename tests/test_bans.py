"""Tokens that may not be drawn: banned ones never, stop tokens not before a row has emitted what it owes."""

import jax
import numpy as np
import pytest
from divergence import assert_same_generation
from lossless import BEST, NEW, mixed_sampling, situation
from situations import CACHE_LENGTH, FAVOURITE, prompts

from reanchor_jax import autoregress, generate
from reanchor_jax.decoding.sampling import filter_logits, position_noise, row_keys
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.decoding.walk import STOP

LEAST = np.asarray([0, 1, 9, 17, NEW], np.int32)
SUPPRESSED = (3, 11, FAVOURITE)


def draws(models, tokens, lengths, keys, sampling, result, *, stops):
    """What each row draws at each place of its own text, from one full pass and the definition of a ban, row by row."""
    found = []
    for row, length in enumerate(lengths):
        emitted = np.asarray(result.tokens[row, : int(result.lengths[row])])
        text = np.zeros((1, CACHE_LENGTH), np.int32)  # one shape for all rows
        text[0, : length + len(emitted)] = np.concatenate([tokens[row, :length], emitted])
        every = np.arange(CACHE_LENGTH, dtype=np.int32)[None]
        logits = np.array(models.target.logits(models.target(text, every, prompt_mask(CACHE_LENGTH)).states))
        logits, positions = logits[:, length - 1 : length + len(emitted) - 1], every[:, length : length + len(emitted)]
        logits[..., SUPPRESSED] = -np.inf
        logits[:, : LEAST[row], stops] = -np.inf
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], sampling)
        scores = logits
        if sampling.temperature[row] > 0:
            scores = filter_logits(logits, alone) + position_noise(keys[row : row + 1], positions, vocab_size=logits.shape[-1])
        found.append((np.asarray(scores[0]).argmax(-1), emitted))
    return found


@pytest.mark.parametrize("name", ["random", "often_right"])
def test_banned_tokens_are_never_drawn_and_stops_not_before_they_may(name):
    """vllm-project/vllm#32642, #26317 (ignored in the verification): rules of position hold at every depth of a block"""
    models, (tokens, lengths) = situation(name), prompts(5, seed=5)
    keys, sampling = row_keys(jax.random.key(5), 5), mixed_sampling()
    request = {"config": BEST, "sampling": sampling, "max_new_tokens": NEW, "suppressed_token_ids": SUPPRESSED, "min_new_tokens": LEAST}
    # every fourth token stops, so that a row which may end does
    stops = [token for token in range(0, 61, 4) if token not in SUPPRESSED]
    got = generate(models, tokens, lengths, keys, stop_token_ids=stops, **request)
    plain = autoregress(models, tokens, lengths, keys, stop_token_ids=stops, **request)
    assert_same_generation(models, tokens, lengths, keys, sampling, got, plain)
    for expected, emitted in draws(models, tokens, lengths, keys, sampling, got, stops=stops):
        np.testing.assert_array_equal(emitted, expected)
    assert (np.asarray(got.finish_reasons[:4]) == STOP).any()
    assert (np.asarray(got.lengths) > LEAST - (LEAST == NEW)).all()


def test_bans_that_cannot_hold_are_refused():
    models, (tokens, lengths) = situation("random"), prompts(2, seed=5)

    def run(**request):
        generate(models, tokens, lengths, jax.random.key(0), config=BEST, max_new_tokens=7, **request)

    for request, rule in (
        ({"suppressed_token_ids": range(61)}, "whole vocabulary"),
        ({"suppressed_token_ids": [61]}, "suppressed_token_ids holds 61, outside the target's vocabulary"),
        ({"suppressed_token_ids": [1.5]}, "suppressed_token_ids must hold integers"),
        ({"min_new_tokens": 8}, r"must lie in 0..max_new_tokens \(7\); got 8"),
        ({"min_new_tokens": [1, 2, 3]}, "one whole number or one per row"),
        ({"min_new_tokens": -1}, "must lie in 0"),
    ):
        with pytest.raises(ValueError, match=rule):
            run(**request)
