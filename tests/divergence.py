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
    """Tokens, lengths and finish reasons are equal, log-probabilities within 1e-4.

    Where a filter would keep other tokens if a score or its own bound were moved by less than NEAR_TIE, either set may count.
    """
    found = find_divergences(models, prompts, prompt_lengths, keys, sampling, got, expected)
    assert not found, "\n".join(f"{'near-tie' if one.is_near_tie else 'difference'}: {one}" for one in found)
    for name in ("tokens", "lengths", "finish_reasons"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(got.log_probs, expected.log_probs, atol=1e-4, rtol=0)
    ours, theirs = np.asarray(got.processed_log_probs), np.array(expected.processed_log_probs)
    for row, place in zip(*np.nonzero(np.abs(ours - theirs) > 1e-4), strict=True):
        text = [*np.asarray(prompts[row])[: int(prompt_lengths[row])].tolist(), *np.asarray(expected.tokens[row, : place + 1]).tolist()]
        edges = _on_the_edges(models, text, jax.tree.map(lambda values, row=row: values[row : row + 1], sampling))
        if all(np.abs(edges - value[row, place]).min() < 1e-4 for value in (ours, theirs)):
            theirs[row, place] = ours[row, place]
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def _on_the_edges(models: Models, text: list[int], sampling: Sampling) -> np.ndarray:
    """Log-probabilities of the last token under the sets that filters might keep: bounds a little moved, near-ties with the last kept token
    all in or all out.
    """
    logits = _logits(models.target, jnp.asarray(text[:-1], jnp.int32)[None])
    scores, found = np.asarray(logits[0, 0]) / float(sampling.temperature[0]), []
    for sign in (-1.0, 0.0, 1.0):
        top_p = jnp.where(sampling.top_p < 1, jnp.clip(sampling.top_p + sign * NEAR_TIE, 0, 1), sampling.top_p)
        moved = sampling._replace(top_p=top_p, min_p=sampling.min_p * (1 - sign * NEAR_TIE))
        kept = np.isfinite(np.asarray(filter_logits(logits, moved))[0, 0])
        near = np.abs(scores - scores[kept].min()) < NEAR_TIE
        for one in (kept, kept | near, kept & ~near):
            found.append(scores[text[-1]] - np.logaddexp.reduce(scores[one], initial=-np.inf))
    return np.asarray(found)


def _margin(models: Models, prefix: list[int], key, sampling: Sampling) -> float:
    """Distance between the two best scores for the token behind the prefix, from one pass without a cache."""
    scores = _scores(models.target, jnp.asarray(prefix, jnp.int32)[None], key, sampling)
    best = np.sort(np.asarray(scores[0, 0]))[-2:]
    return float(best[1] - best[0])


@jax.jit
def _scores(target: Target, tokens, key, sampling: Sampling):
    logits = _logits(target, tokens)
    noise = position_noise(key[None], jnp.full((1, 1), tokens.shape[1], jnp.int32), vocab_size=logits.shape[-1])
    return jnp.where(sampling.temperature[0] > 0, filter_logits(logits, sampling) + noise, logits)


@jax.jit
def _logits(target: Target, tokens):
    count = tokens.shape[1]
    output = target(tokens, jnp.arange(count, dtype=jnp.int32)[None], jnp.tril(jnp.ones((1, count, count), bool)))
    return target.logits(output.states[:, -1:]).astype(jnp.float32)
