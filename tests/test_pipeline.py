"""`step` and `generate` as parts of a user's program: jit, scan, vmap, donation, few compilations, no host, no copy of a cache."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from situations import CACHE_LENGTH, flat, prompts, small_config, small_models
from tiny import random_models, tiny_drafter_config, tiny_llama_config

from reanchor_jax import DecodeConfig, autoregress, generate, make_sampling, prefill, step
from reanchor_jax.decoding import loop
from reanchor_jax.decoding.config import Arm, Schedule
from reanchor_jax.decoding.sampling import row_keys

NEW = 21
CONFIG = DecodeConfig.reanchor(
    retain="both", draft_choice="coupled", cache_length=CACHE_LENGTH, max_offsets=3, num_nodes=9, block_buckets=(), node_buckets=()
)
BUCKETED = replace(CONFIG, block_buckets=(2,), node_buckets=(5,))
PLAIN = DecodeConfig.autoregressive(cache_length=CACHE_LENGTH)
SCHEDULED = DecodeConfig.scheduled(
    Schedule(
        arms=tuple(
            Arm(num_blocks=blocks, num_nodes=nodes, is_chain=is_chain, seconds=((cost,), (cost,)), tokens=(cost, cost))
            for blocks, nodes, is_chain, cost in ((0, 1, False, 1.0), (1, 4, True, 2.0), (3, 9, False, 3.0))
        ),
        contexts=(0,),
        spread=0.5,
    ),
    cache_length=CACHE_LENGTH,
)


@functools.cache
def mini():
    """One layer each, blocks of 4: what compiles fastest."""
    target = tiny_llama_config(num_hidden_layers=1)
    drafter = tiny_drafter_config(target, block_size=4, num_hidden_layers=1, layer_types=["full_attention"], target_layer_ids=[0])
    return flat(random_models(target, drafter, seed=3))


@functools.cache
def request_of(num_rows):
    tokens, lengths = prompts(num_rows, seed=num_rows)
    return jnp.asarray(tokens), jnp.asarray(lengths), row_keys(jax.random.key(5), num_rows)


def sampling(num_rows):
    return make_sampling(num_rows, temperature=np.resize([1.0, 0.0, 0.7], num_rows))


@functools.partial(jax.jit, static_argnames="config")
def begin(models, tokens, lengths, keys, *, config):
    return prefill(models, tokens, lengths, keys, config=config, sampling=sampling(tokens.shape[0]), max_new_tokens=NEW)


@functools.cache
def expected(num_rows):
    return autoregress(mini(), *request_of(num_rows), config=PLAIN, sampling=sampling(num_rows), max_new_tokens=NEW)


def emitted_rows(first, infos):
    """Tokens of each row from the prefill's Emitted and those of all rounds."""
    rows = [[int(token)] for token in first.tokens[:, 0]]
    for info in infos:
        for row, count in enumerate(info.emitted.num_emitted.tolist()):
            rows[row].extend(np.asarray(info.emitted.tokens)[row, :count].tolist())
    return rows


@pytest.fixture(scope="module")
def stepped():
    """Rounds of the speculative config under a user's jit, state donated: the prefill's tokens, StepInfo of each round, last state."""
    jitted = jax.jit(functools.partial(step, config=CONFIG), donate_argnums=1)
    state, first = begin(mini(), *request_of(3), config=CONFIG)
    infos = []
    while (np.asarray(state.finish) == 0).any():
        old = state
        state, info = jitted(mini(), old)
        infos.append(info)
        # an unusable donation would be a warning, and so an error here
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(mini()))
    again, info = jitted(mini(), state)
    assert not info.num_emitted.any()
    assert (again.finish == 2).all()
    assert jitted._cache_size() == 1
    return first, infos, again


def test_steps_under_jit_with_a_donated_state_emit_what_generate_emits(stepped):
    first, infos, _ = stepped
    assert emitted_rows(first, infos) == expected(3).tokens.tolist()


def test_caches_hold_what_one_pass_over_the_committed_text_computes(stepped):
    """Through accepted paths of both kinds of block; the drafter's cache never shows in the text, so only this tells it is right."""
    first, infos, state = stepped
    assert any(np.asarray(info.is_shifted).any() for info in infos)
    tokens, lengths, _ = request_of(3)
    rows = emitted_rows(first, infos)
    np.testing.assert_array_equal(state.lengths, lengths + NEW - 1)
    for row, emitted in enumerate(rows):
        text = [*np.asarray(tokens[row, : lengths[row]]).tolist(), *emitted[:-1]]
        padded = jnp.asarray([text + [0] * (CACHE_LENGTH - len(text))], jnp.int32)
        for ours, theirs in zip((state.target_cache, state.drafter_cache), keys_values_of_text(mini(), padded), strict=True):
            for buffer, one_pass in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(buffer[row, :, : len(text)], one_pass[0, :, : len(text)], atol=1e-5)


@jax.jit
def keys_values_of_text(models, tokens):
    """Keys and values of target and drafter for every place of a text, from one pass without a cache."""
    count = tokens.shape[1]
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    mask = jnp.tril(jnp.ones((1, count, count), bool))
    output = models.target(tokens, positions, mask, target_layer_ids=models.drafter.config.target_layer_ids)
    return output.keys_values, models.drafter.context_keys_values(models.drafter.features(output.taps), positions)


@pytest.mark.slow
def test_a_fixed_number_of_rounds_under_scan_in_buckets_emits_the_same_in_the_same_rounds(stepped):
    """Neither tokens nor rounds depend on the sizes at which a round was compiled, nor on rounds after the end."""

    @jax.jit
    def rounds(models, state):
        return jax.lax.scan(lambda state, _: step(models, state, config=BUCKETED), state, None, length=NEW - 1)

    state, first = begin(mini(), *request_of(3), config=BUCKETED)
    state, infos = rounds(mini(), state)
    assert (state.finish == 2).all()
    unstacked = [jax.tree.map(lambda field, index=index: field[index], infos) for index in range(NEW - 1)]
    assert emitted_rows(first, unstacked) == expected(3).tokens.tolist()
    for ours, theirs in zip(unstacked, stepped[1], strict=False):  # what follows is empty
        for name in ours._fields[1:]:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert not np.asarray(infos.num_emitted)[len(stepped[1]) :].any()
    for sizes, bucket in ((infos.num_nodes, 5), (1 + infos.num_offsets, 2)):
        largest = np.asarray(sizes).max(axis=1)[: len(stepped[1])]
        assert largest.min() <= bucket < largest.max()


def test_generate_inside_a_users_jit_and_vmap_over_seeds_equals_one_call_a_seed():
    tokens, lengths = (np.asarray(values) for values in request_of(3)[:2])

    @jax.jit
    def many(models, keys):  # prompts are constants of the user's program here, and arguments in the tests above
        def one(key):
            return generate(models, tokens, lengths, key, config=CONFIG, sampling=sampling(3), max_new_tokens=NEW)

        return jax.vmap(one)(keys)

    keys = jax.random.split(jax.random.key(7), 4)
    batch = many(mini(), keys)
    for index in range(4):
        alone = autoregress(mini(), tokens, lengths, keys[index], config=PLAIN, sampling=sampling(3), max_new_tokens=NEW)
        np.testing.assert_array_equal(batch.tokens[index], alone.tokens)
        np.testing.assert_allclose(batch.log_probs[index], alone.log_probs, atol=1e-4)
    assert (np.asarray(batch.info.num_accepted) > 0).any()


def test_no_request_of_another_length_or_temperature_compiles_again():
    """20 prompt lengths, 5 temperatures, and whatever else changes from request to request.

    keras-team/keras-hub#779, NovaSky-AI/SkyRL#539, sgl-project/sglang-jax#117
    """
    models, config = flat(small_models(3)), small_config("both", "coupled")
    sizes = set()
    for number in range(20):
        longest = 1 + 2 * number
        tokens, lengths = prompts(5, seed=number, longest=longest)
        lengths[0] = longest
        generate(
            models,
            tokens,
            lengths,
            jax.random.key(number),
            config=config,
            sampling=make_sampling(
                5, temperature=[0.0, 0.4, 0.7, 1.0, 1.3][number % 5], top_p=1 - number / 40, top_k=number, min_p=number / 100
            ),
            max_new_tokens=1 + number,
            stop_token_ids=range(number % 9),
            budgets=np.full(5, 1 + number // 2),
        )
        sizes.add(loop._generate._cache_size())
    assert len(sizes) == 1


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_neither_states_nor_masks_grow_with_the_context():
    """vllm-project/vllm#12751, #15506, sgl-project/sglang#13765, #37553, warpfront/hipfire#486

    Of the context's length there are caches, prompts and single rows of places; states, taps and masks are of a chunk, a trie or a block.
    """
    length = 512
    config = replace(CONFIG, cache_length=length, prefill_chunk=64)
    tokens, keys = jax.ShapeDtypeStruct((3, length - NEW), jnp.int32), row_keys(jax.random.key(0), 3)
    lengths = jax.ShapeDtypeStruct((3,), jnp.int32)

    def whole(models, tokens, lengths, keys):
        return generate(models, tokens, lengths, keys, config=config, max_new_tokens=NEW)

    state, _ = jax.eval_shape(functools.partial(prefill, config=config, max_new_tokens=NEW), mini(), tokens, lengths, keys)
    caches = {buffer.shape for buffer in [*state.target_cache, *state.drafter_cache]}
    made = {shape for shape in shapes_made(jax.make_jaxpr(whole)(mini(), tokens, lengths, keys).jaxpr) if max(shape, default=0) >= 450}
    assert caches <= made
    others = made - caches
    assert others
    assert max(map(np.prod, others)) <= 3 * max(shape[2] for shape in caches), others


def shapes_made(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from shapes_made(inner)


@pytest.mark.parametrize("config", [PLAIN, CONFIG], ids=["plain", "speculative"])
def test_nothing_in_the_program_calls_the_host(config):
    tokens, lengths, keys = request_of(3)
    models = mini() if config.is_speculative else mini()._replace(drafter=None)

    def whole(models, tokens, lengths, keys):
        return generate(models, tokens, lengths, keys, config=config, sampling=sampling(3), max_new_tokens=NEW)

    names = set(primitives(jax.make_jaxpr(whole)(models, tokens, lengths, keys).jaxpr))
    assert {"while", "dot_general", "cond"} <= names  # the walk went into loops and branches
    assert not [name for name in names if re.search("callback|infeed|outfeed|print", name)]


def test_an_unjitted_prefill_makes_a_state_that_can_be_donated():
    """No array stands in it twice, and none is the caller's."""
    tokens, lengths, keys = request_of(3)
    state, _ = prefill(mini(), tokens, lengths, keys, config=CONFIG, max_new_tokens=NEW)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.int32 and leaf.size]
    assert len(set(pointers)) == len(pointers)
    assert lengths.unsafe_buffer_pointer() not in pointers


@pytest.mark.skipif(jax.__version__.startswith("0.10"), reason="XLA of jax 0.10 copies a target cache around the chunk that writes it")
@pytest.mark.parametrize("config", [PLAIN, CONFIG], ids=["plain", "speculative"])
def test_no_chunk_of_a_prompt_copies_a_cache(config):
    models = mini() if config.is_speculative else mini()._replace(drafter=None)
    start = functools.partial(prefill, config=replace(config, cache_length=192), max_new_tokens=NEW)
    request = jax.ShapeDtypeStruct((2, 100), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32), row_keys(jax.random.key(0), 2)
    state, _ = jax.eval_shape(start, models, *request)
    operations = made_of_a_caches_size(jax.jit(start).lower(models, *request).compile(), state)
    assert set(operations) <= IN_PLACE | {"broadcast"}
    assert operations.count("fusion") == 2 * len([*state.target_cache, *state.drafter_cache])  # the zeros to begin with, and the writes


IN_PLACE = {"dynamic-update-slice", "scatter", "parameter", "get-tuple-element", "bitcast", "fusion"}


def made_of_a_caches_size(compiled, state):
    """Operations of the optimized program whose result has the shape of a cache of the state."""
    shapes = {f"f32[{','.join(map(str, buffer.shape))}]" for buffer in [*state.target_cache, *state.drafter_cache]}
    made = [line for line in compiled.as_text().splitlines() if any(f" = {shape}" in line for shape in shapes)]
    return [re.search(r"\} ([\w-]+)\(", line)[1] for line in made]


@pytest.mark.parametrize(
    ("config", "num_rows"),
    [(PLAIN, 1), (PLAIN, 4), pytest.param(BUCKETED, 1, marks=pytest.mark.slow), (BUCKETED, 4), (SCHEDULED, 3)],
    ids=["plain 1", "plain 4", "speculative 1", "speculative 4", "scheduled 3"],
)
def test_no_round_copies_a_cache(config, num_rows):
    """In the optimized program of a loop of rounds, nothing of a cache's size is made but the in-place writes.

    sgl-project/sglang-jax#1147, #65, openxla/xla#45912, jax-ml/jax#21367
    """
    config = replace(config, cache_length=192)  # larger than what one step of attention reads
    models = mini() if config.is_speculative else mini()._replace(drafter=None)
    state = jax.eval_shape(functools.partial(begin, config=config), models, *request_of(num_rows))[0]

    def rounds(models, state):
        return jax.lax.fori_loop(0, 5, lambda _, state: step(models, state, config=config)[0], state)

    compiled = jax.jit(rounds, donate_argnums=1).lower(models, state).compile()
    buffers = [*state.target_cache, *state.drafter_cache]
    operations = made_of_a_caches_size(compiled, state)
    assert {"dynamic-update-slice", "scatter"} & set(operations)
    assert set(operations) <= IN_PLACE
    # a fusion of that size is one of the writes: a round commits to every buffer, and of a schedule plain tokens go to the target's before
    # that, and what the drafter reads later to its own
    num_writes = 1 if config.schedule is None else 2
    assert operations.count("fusion") == num_writes * len(buffers)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(buffer.size * 4 for buffer in buffers)
