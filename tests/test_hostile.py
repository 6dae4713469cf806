"""Bad requests are refused on the host, before tracing, with the name, the value and what to do."""

import functools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from situations import small_config, small_models
from tiny import random_models, tiny_drafter_config, tiny_llama_config

from reanchor_jax import DecodeConfig, autoregress, generate, make_sampling, prefill, step
from reanchor_jax.decoding import loop

CONFIG = small_config("both", "coupled")


@functools.cache
def pair():
    return small_models(3)


def request_of(**overrides):
    """A good request, changed as told."""
    given = {
        "models": pair(),
        "prompts": np.asarray([[5, 9, 2, 0], [7, 1, 4, 60]], np.int32),
        "prompt_lengths": np.asarray([3, 4], np.int32),
        "key": jax.random.key(0),
        "config": CONFIG,
        "max_new_tokens": 8,
        **overrides,
    }
    return [given.pop(name) for name in ("models", "prompts", "prompt_lengths", "key")], given


def refuse(text, **overrides):
    """`generate` and `prefill` both raise, and nothing was compiled."""
    positional, named = request_of(**overrides)
    compiled = loop._generate._cache_size()
    for door in (generate, prefill):
        with pytest.raises(ValueError, match=text):
            door(*positional, **named)
    assert loop._generate._cache_size() == compiled


def other_pair(**drafter_overrides):
    drafter = tiny_drafter_config(tiny_llama_config(num_hidden_layers=2), num_hidden_layers=1, layer_types=["full_attention"])
    drafter |= drafter_overrides
    drafter["dflash_config"] = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [0]}
    return random_models(tiny_llama_config(num_hidden_layers=2), drafter, seed=5)


BAD_REQUESTS = {
    "a dict as config": ({"config": {}}, "config must be a DecodeConfig; got dict"),
    "a number as sampling": ({"sampling": 0.7}, "sampling must be a Sampling; got float"),
    "a number as key": ({"key": 0}, "key must be a JAX key such as .*; got int"),
    "a key of floats": ({"key": np.zeros(2, np.float32)}, r"key must be a JAX key such as .*; got float32 of shape \(2,\)"),
    "min-p above 1 in a hand-made sampling": (
        {"sampling": make_sampling(2)._replace(min_p=np.asarray([0.1, 2.0], np.float32))},
        r"min_p must lie in \[0, 1\]; got \[0.1 2.*use 0 to keep all tokens",
    ),
    "NaN temperature in a hand-made sampling": (
        {"sampling": make_sampling(2)._replace(temperature=np.asarray([np.nan, 0.0], np.float32))},
        "temperature must be 0 or more",
    ),
    "prompt longer than the cache": (
        {"prompts": np.zeros((1, 70), np.int32), "prompt_lengths": np.asarray([60])},
        r"prompt \(60\) \+ max_new_tokens \(8\) exceed cache_length \(64\); raise cache_length to 68",
    ),
    "one token too many": (
        {"max_new_tokens": 61},
        r"prompt \(4\) \+ max_new_tokens \(61\) exceed cache_length \(64\); raise cache_length to 65",
    ),
    "no row": (
        {"prompts": np.zeros((0, 4), np.int32), "prompt_lengths": np.zeros(0, np.int32)},
        r"at least one of each; got shape \(0, 4\)",
    ),
    "no token": (
        {"prompts": np.zeros((2, 0), np.int32)},
        r"prompts must be \[rows, tokens\] with at least one of each; got shape \(2, 0\)",
    ),
    "one flat prompt": ({"prompts": np.asarray([5, 9, 2])}, r"prompts must be \[rows, tokens\] .* got shape \(3,\)"),
    "a row of length 0": (
        {"prompt_lengths": np.asarray([0, 4])},
        r"prompt_lengths must lie in 1..4; got \[0, 4\]; a prompt needs at least one token",
    ),
    "a length beyond the padding": ({"prompt_lengths": np.asarray([3, 5])}, r"prompt_lengths must lie in 1..4; got \[3, 5\]"),
    "a negative length": ({"prompt_lengths": np.asarray([-1, 4])}, r"prompt_lengths must lie in 1..4; got \[-1, 4\]"),
    "lengths of other rows": (
        {"prompt_lengths": np.asarray([3, 4, 4])},
        r"prompt_lengths must hold one number per row \(2\); got shape \(3,\)",
    ),
    "a token beyond the vocabulary": (
        {"prompts": np.asarray([[5, 61, 2, 0], [7, 1, 4, 6]])},
        r"prompts hold token id 61, outside the target's vocabulary 0..60",
    ),
    "a negative token": ({"prompts": np.asarray([[5, -3, 2, 0], [7, 1, 4, 6]])}, r"prompts hold token id -3, outside .* 0..60"),
    "float prompts": ({"prompts": np.zeros((2, 4), np.float32)}, r"prompts and prompt_lengths must hold integers; got float32"),
    "float lengths": ({"prompt_lengths": np.asarray([3.0, 4.0])}, r"must hold integers; got int32 and float64"),
    "bool prompts": ({"prompts": np.ones((2, 4), bool)}, r"must hold integers; got bool"),
    "no new token": ({"max_new_tokens": 0}, r"max_new_tokens must be a whole number of at least 1; got 0"),
    "half a new token": ({"max_new_tokens": 2.5}, r"max_new_tokens must be a whole number of at least 1; got 2.5"),
    "true new tokens": ({"max_new_tokens": True}, r"max_new_tokens must be a whole number of at least 1; got True"),
    "a budget of 0": ({"budgets": np.asarray([0, 8])}, r"budgets must be at least 1 token a row; got \[0, 8\]"),
    "budgets of other rows": ({"budgets": np.asarray([8])}, r"budgets must hold one number per row \(2\); got shape \(1,\)"),
    "float budgets": ({"budgets": np.asarray([1.5, 2.0])}, r"budgets must hold integers; got float"),
    "a stop token beyond the vocabulary": ({"stop_token_ids": [3, 61]}, r"stop_token_ids holds 61, outside the target's vocabulary 0..60"),
    "a negative stop token": ({"stop_token_ids": [-2]}, r"stop_token_ids holds -2, outside the target's vocabulary"),
    "a float stop token": ({"stop_token_ids": [2.5]}, r"stop_token_ids must hold integers; got float64"),
    "keys of other rows": ({"key": jax.random.split(jax.random.key(0), 3)}, r"key must be one key or one per row \(2\); got shape \(3,\)"),
    "sampling of other rows": (
        {"sampling": make_sampling(3)},
        r"sampling.temperature must hold one number per row \(2\); got shape \(3,\)",
    ),
    "a cache longer than the target's positions": (
        {"config": DecodeConfig.dflash(cache_length=513)},
        r"cache_length \(513\) exceeds the 512 positions the target was made for; lower it",
    ),
    "a trie smaller than a block": (
        {"config": DecodeConfig.dflash(cache_length=64, num_nodes=4)},
        r"num_nodes \(4\) must hold the baseline block of 5 tokens; raise it to at least 5",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_before_tracing(name):
    overrides, text = BAD_REQUESTS[name]
    refuse(text, **overrides)


def test_a_speculative_config_needs_a_drafter():
    refuse(
        r"this config drafts, but models.drafter is None; load a pair or use DecodeConfig.autoregressive\(\)",
        models=pair()._replace(drafter=None),
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"hidden_size": 28}, r"drafter width \(28\) differs from the target's \(24\)"),
        ({"vocab_size": 67}, r"drafter vocab_size \(67\) differs from the target's \(61\)"),
        ({"num_target_layers": 9}, r"the drafter was made for a target of 9 layers, this one has 2"),
    ],
)
def test_a_drafter_of_another_target_is_refused(overrides, text):
    refuse(f"{text}.*do not belong together", models=other_pair(**overrides))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"retain": "everything"}, "retain must be one of none, baseline, suffix, deepest, both, descendants; got 'everything'"),
        ({"draft_choice": "best"}, "draft_choice must be one of argmax, independent, coupled; got 'best'"),
        ({"max_offsets": -1}, "max_offsets must be 0 or more; got -1"),
        ({"max_offsets": 3}, r"max_offsets \(3\) needs retained states; set retain to one of baseline, suffix, deepest, both, descendants"),
        ({"cache_length": 0}, "cache_length must be at least 1; got 0"),
        ({"prefill_chunk": 100}, "prefill_chunk must be a positive multiple of 64; got 100"),
        ({"num_nodes": -1}, "num_nodes must lie in 0..4096"),
        ({"is_speculative": False, "num_nodes": 16}, "is_speculative=False takes neither retain nor num_nodes; leave them out"),
        ({"is_speculative": False, "retain": "both"}, "is_speculative=False takes neither retain nor num_nodes; leave them out"),
        ({"block_buckets": (4, 4)}, r"block_buckets must be a tuple of strictly rising positive integers; got \(4, 4\)"),
        ({"node_buckets": (0, 16)}, r"node_buckets must be a tuple of strictly rising positive integers; got \(0, 16\)"),
        ({"node_buckets": [16]}, r"node_buckets must be a tuple of strictly rising positive integers; got \[16\]"),
    ],
)
def test_a_bad_config_is_refused_when_it_is_made(given, text):
    with pytest.raises(ValueError, match=text):
        DecodeConfig(**given)


def test_inside_a_trace_shapes_are_still_checked():
    """Values cannot be known there, so the whole width of the prompts counts as their length."""
    positional, named = request_of(max_new_tokens=61)

    def inside(prompts, lengths):
        return generate(positional[0], prompts, lengths, positional[3], **named)

    with pytest.raises(ValueError, match=re.escape("prompt (4) + max_new_tokens (61) exceed cache_length (64)")):
        jax.eval_shape(inside, positional[1], positional[2])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(CONFIG, max_offsets=4), r"the state holds 5 retained entries, this config 4 \(max_offsets\)"),
        (DecodeConfig.autoregressive(cache_length=64), r"the state holds 5 retained entries, this config 0"),
        (replace(CONFIG, cache_length=200), r"the state's cache has 128 slots, this config 256"),
    ],
)
def test_a_state_of_another_config_is_refused(config, text):
    positional, named = request_of()
    state, _ = jax.eval_shape(lambda: prefill(*positional, **named))
    with pytest.raises(ValueError, match=f"{text}.*step with the config it was prefilled with"):
        jax.eval_shape(lambda state: step(positional[0], state, config=config), state)


def test_lists_are_taken_as_arrays():
    (models, tokens, lengths, key), _ = request_of()
    given = {"max_new_tokens": 8, "config": CONFIG}
    expected = autoregress(models, tokens, lengths, key, budgets=np.asarray([3, 8]), **given)
    found = autoregress(models, tokens.tolist(), lengths.tolist(), key, budgets=[3, 8], **given)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.lengths.tolist() == [3, 8]


def test_what_stands_behind_a_prompt_is_not_read():
    """Padding may hold anything, ids outside the vocabulary included."""
    (models, tokens, lengths, key), named = request_of()
    plain = autoregress(models, tokens, lengths, key, **named)
    for filler in (-1, 61, np.iinfo(np.int32).max):
        dirty = np.where(np.arange(4)[None] < lengths[:, None], tokens, filler).astype(np.int32)
        np.testing.assert_array_equal(autoregress(models, dirty, lengths, key, **named).tokens, plain.tokens)
