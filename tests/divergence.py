"""Compare a generation with the one it must equal, and say how close a call every difference was.

In: two Generations of the same request.
Out: a Divergence for each row that differs. A near-tie (margin below 1e-4) is told apart, never left out.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax import Generation, Models, Sampling, Target
from reanchor_jax.decoding.sampling import filter_logits, position_noise

NEAR_TIE = 1e-4


class Divergence(NamedTuple):
    """First place where a row's tokens differ; margin is that between the two best scores there, after filters and noise."""

    row: int
    place: int
    token: int
    expected: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def find_divergences(
    models: Models, prompts, prompt_lengths, keys, sampling: Sampling, got: Generation, expected: Generation
) -> list[Divergence]:
    """First difference of every row that differs in tokens or length."""
    found = []
    for row in range(len(prompts)):
        ours, theirs = np.asarray(got.tokens[row]), np.asarray(expected.tokens[row])
        is_same = (ours == theirs) & (np.arange(ours.size) < min(int(got.lengths[row]), int(expected.lengths[row])))
        if is_same.all() or (int(got.lengths[row]) == int(expected.lengths[row]) == int(np.argmin(is_same))):
            continue
        place = int(np.argmin(is_same))
        prefix = [*np.asarray(prompts[row])[: int(prompt_lengths[row])].tolist(), *theirs[:place].tolist()]
        margin = _margin(models, prefix, keys[row], jax.tree.map(lambda values, row=row: values[row : row + 1], sampling))
        found.append(Divergence(row=row, place=place, token=int(ours[place]), expected=int(theirs[place]), margin=margin))
    return found


def assert_same_generation(models: Models, prompts, prompt_lengths, keys, sampling: Sampling, got: Generation, expected: Generation):
    """Tokens, lengths and finish reasons are equal, log-probabilities within 1e-4."""
    found = find_divergences(models, prompts, prompt_lengths, keys, sampling, got, expected)
    assert not found, "\n".join(f"{'near-tie' if one.is_near_tie else 'difference'}: {one}" for one in found)
    for name in ("tokens", "lengths", "finish_reasons"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    for name in ("log_probs", "processed_log_probs"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=1e-4, rtol=0, err_msg=name)


def _margin(models: Models, prefix: list[int], key, sampling: Sampling) -> float:
    """Distance between the two best scores for the token behind the prefix, from one pass without a cache."""
    scores = _scores(models.target, jnp.asarray(prefix, jnp.int32)[None], key, sampling)
    best = np.sort(np.asarray(scores[0, 0]))[-2:]
    return float(best[1] - best[0])


@jax.jit
def _scores(target: Target, tokens, key, sampling: Sampling):
    count = tokens.shape[1]
    output = target(tokens, jnp.arange(count, dtype=jnp.int32)[None], jnp.tril(jnp.ones((1, count, count), bool)))
    logits = target.logits(output.states[:, -1:]).astype(jnp.float32)
    noise = position_noise(key[None], jnp.full((1, 1), count, jnp.int32), vocab_size=logits.shape[-1])
    return jnp.where(sampling.temperature[0] > 0, filter_logits(logits, sampling) + noise, logits)
