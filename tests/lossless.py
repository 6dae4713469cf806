"""One request run both ways and compared; what the tests of losslessness share.

In: models of a situation, a config, a request.
Out: the speculative result, after an assertion that it equals `autoregress`.
"""

import functools

import jax
from divergence import assert_same_generation
from situations import always_wrong, flat, often_right, prompts, small_config, small_models

from reanchor_jax import autoregress, generate, make_sampling
from reanchor_jax.decoding.sampling import row_keys

NEW = 40
SHORT = 24  # where rounds that accept nothing take the time
SITUATIONS = {"random": lambda models: models, "flat": flat, "often_right": often_right, "always_wrong": always_wrong}
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
