"""What is sampled follows the target's own distribution, worked out over every continuation of a tiny vocabulary."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2
from tiny import random_models, tiny_drafter_config, tiny_llama_config

from reanchor_jax import DecodeConfig, generate, make_sampling
from reanchor_jax.decoding.config import DRAFT_CHOICES
from reanchor_jax.decoding.sampling import filter_logits

VOCAB, LONG = 4, 4
PROMPT = [2, 0, 3, 1, 1]
FALSE_ALARM = 1e-6  # odds that one of these tests fails though all is well; keys are fixed, so a pass stays a pass

PROPOSALS = {
    "chain": {},
    "reanchor": {"retain": "both", "num_nodes": 7},
    "marginal": {"expand": "marginal", "num_nodes": 6},
    "merge": {"expand": "merge", "retain": "both", "num_nodes": 9},
}
QUICK = [("reanchor", "coupled", 2000)]
CASES = [
    *QUICK,
    *(pytest.param(name, choice, 20000, marks=pytest.mark.slow) for name in PROPOSALS for choice in DRAFT_CHOICES),
]


@pytest.fixture(scope="module")
def models():
    target = tiny_llama_config(num_hidden_layers=1, vocab_size=VOCAB)
    drafter = tiny_drafter_config(target, block_size=3, num_hidden_layers=1, layer_types=["full_attention"], target_layer_ids=[0])
    return random_models(target, drafter, seed=8)


def exact_probabilities(models, sampling):
    """Probability of each of the VOCAB**LONG continuations, from one pass over all of them."""
    texts = np.asarray([[*PROMPT, *text] for text in itertools.product(range(VOCAB), repeat=LONG)], np.int32)
    count = texts.shape[1]

    @jax.jit
    def log_probs(target, texts):
        mask = jnp.tril(jnp.ones((1, count, count), bool))
        states = target(texts, jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), texts.shape), mask).states
        return target.logits(states[:, len(PROMPT) - 1 : -1])

    logits = np.asarray(log_probs(models.target, texts))
    repeated = jax.tree.map(lambda value: jnp.broadcast_to(value[:1], len(texts)), sampling)
    of_token = jax.nn.log_softmax(jax.jit(filter_logits)(logits, repeated), axis=-1)
    chosen = np.take_along_axis(np.asarray(of_token, np.float64), texts[:, len(PROMPT) :, None], axis=2)[..., 0]
    return np.exp(chosen.sum(axis=1))


@pytest.mark.parametrize(("proposal", "draft_choice", "num_rows"), CASES)
def test_sampled_texts_follow_the_targets_distribution(models, proposal, draft_choice, num_rows):
    sampling = make_sampling(num_rows, temperature=0.8, top_k=3)
    expected = exact_probabilities(models, sampling)
    assert expected.sum() == pytest.approx(1, abs=1e-4)
    config = DecodeConfig(draft_choice=draft_choice, cache_length=64, block_buckets=(), **PROPOSALS[proposal])
    result = generate(
        models,
        np.tile(np.asarray(PROMPT, np.int32), (num_rows, 1)),
        np.full(num_rows, len(PROMPT), np.int32),
        jax.random.key(11),
        config=config,
        sampling=sampling,
        max_new_tokens=LONG,
    )
    assert (np.asarray(result.info.num_accepted) > 0).mean() > 0.1  # draws of drafted tokens are among what is tested
    cells = np.asarray(result.tokens) @ VOCAB ** np.arange(LONG)[::-1]
    counts = np.bincount(cells, minlength=VOCAB**LONG)
    assert counts[expected == 0].sum() == 0  # what the filter removes never comes
    # cells expected fewer than 5 times are counted as one
    is_rare = num_rows * expected < 5
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = num_rows * np.append(expected[~is_rare], expected[is_rare].sum())
    possible = wanted > 0  # with many rows only what cannot come may be rare
    observed, wanted = observed[possible], wanted[possible]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert chi2.sf(statistic, df=observed.size - 1) > FALSE_ALARM / len(CASES)
    assert observed.size > 30
