"""A refiner's passes against drafting in turn, what its slots read, and which component a block of a mixture gets."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from situations import small_models

from reanchor_jax import checkpoint
from reanchor_jax.decoding.draft import _Blocks, _choose_in_passes, _with_component
from reanchor_jax.decoding.sampling import argmax, component_noise, draft_noise, make_sampling, position_noise, row_keys

ROWS, BLOCKS, DRAFTS, WIDTH, VOCABULARY = 2, 3, 4, 24, 61


@functools.cache
def drafter(family):
    return small_models(3, family=family).drafter


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@jax.jit
def corrections(head, states, previous):
    return head(head.read(states), previous)


def test_a_correction_reads_the_tokens_before_its_slot_and_none_behind():
    head, states = drafter("xpress").causal_head, random(DRAFTS, WIDTH)
    previous = np.asarray([5, 17, 3, 40], np.int32)
    before = corrections(head, states, previous)
    for slot in range(DRAFTS):
        changed = previous.copy()
        changed[slot] += 1
        after = corrections(head, states, changed)
        np.testing.assert_array_equal(after[:slot], before[:slot])
        assert (np.abs(after[slot:] - before[slot:]).max(axis=-1) > 1e-3).all()


def test_a_pass_settles_a_token_and_as_many_as_there_are_drafts_equal_drafting_in_turn():
    own = drafter("xpress")
    states, logits = random(ROWS, BLOCKS, DRAFTS, WIDTH), random(ROWS, BLOCKS, DRAFTS, VOCABULARY, seed=1)
    anchors = np.random.default_rng(2).integers(VOCABULARY, size=(ROWS, BLOCKS)).astype(np.int32)
    in_turn = np.zeros((ROWS, BLOCKS, DRAFTS), np.int32)
    for slot in range(DRAFTS):
        previous = np.concatenate([anchors[:, :, None], in_turn[:, :, :-1]], axis=2)
        in_turn[:, :, slot] = np.argmax(logits + corrections(own.causal_head, states, previous), axis=-1)[:, :, slot]
    num_right = []
    for num_passes in (1, 2, DRAFTS, DRAFTS + 3):
        config = dataclasses.replace(own.config, head=dataclasses.replace(own.config.head, num_passes=num_passes))
        other = checkpoint.with_leaves(checkpoint.build_drafter(config, jnp.float32), checkpoint.leaves(own))
        none = jnp.zeros_like(anchors)
        blocks = _Blocks(anchors=anchors, offsets=none, is_block=none == 0, states=states, logits=logits)
        tokens, corrected = jax.jit(lambda *given: _choose_in_passes(given[0], given[0].causal_head, *given[1:], lambda x, _: argmax(x)))(
            other, blocks, none
        )
        np.testing.assert_array_equal(tokens[:, :, :num_passes], in_turn[:, :, :num_passes])
        np.testing.assert_array_equal(tokens, np.argmax(corrected, axis=-1))
        num_right.append(int((tokens == in_turn).sum()))
    assert num_right[0] < num_right[-1] == in_turn.size
    assert (np.argmax(logits, axis=-1) != in_turn).any()


@functools.cache
def mixed():
    """A mixture, states of its blocks' predicting slots and anchors, and a row that is greedy beside one that is sampled."""
    mixture = drafter("dblast").latent_mixture
    return (
        mixture,
        random(ROWS, BLOCKS, DRAFTS, WIDTH),
        0.3 * random(ROWS, BLOCKS, WIDTH, seed=1),
        make_sampling(ROWS, temperature=[0, 0.8]),
    )


def components_of(states):
    """The component of every slot, told by its states."""
    mixture, plain, _, _ = mixed()
    distance = np.abs(states[:, :, :, None] - mixture(plain)).max(axis=-1)
    assert np.sort(distance, axis=-1)[..., 1].min() > 1e-2  # no two components are alike
    return distance.argmin(axis=-1)


def test_all_slots_of_a_block_share_a_component_the_likeliest_unless_one_is_drawn():
    mixture, states, anchor_states, sampling = mixed()
    likeliest = np.argmax(mixture.log_priors(anchor_states), axis=-1)
    plain = components_of(_with_component(mixture, states, anchor_states, sampling, None))
    np.testing.assert_array_equal(plain, np.broadcast_to(likeliest[:, :, None], plain.shape))
    noise = jnp.broadcast_to(jnp.asarray([0.0, 0.0, 100.0]), (ROWS, BLOCKS, 3))
    drawn = components_of(_with_component(mixture, states, anchor_states, sampling, noise))
    np.testing.assert_array_equal(drawn[0], plain[0])
    assert (drawn[1] == 2).all()
    assert (plain[1] != 2).any()


def test_a_component_is_drawn_by_row_position_and_block_and_by_no_noise_of_a_token():
    keys, positions = row_keys(jax.random.key(5), 3), jnp.asarray([[7, 9], [7, 7], [2, 3]], jnp.int32)
    noise = component_noise(keys, positions, num_components=4)
    np.testing.assert_array_equal(component_noise(keys[2:], positions[2:, :1], num_components=4), noise[2:, :1])
    of_tokens = position_noise(keys, positions, vocab_size=4)
    of_drafts = draft_noise(keys, positions[:, :, None], first_block=0, vocab_size=4)[:, :, 0]
    every = np.concatenate([np.asarray(one).ravel() for one in (noise, of_tokens, of_drafts)])
    assert len(np.unique(every)) == every.size - 4  # the target's own noise of row 1, position 7, is in twice


def test_components_are_drawn_as_often_as_their_prior_says():
    """4000 draws; a share strays by more than five of its standard errors with odds below 2e-6."""
    log_priors = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    noise = component_noise(row_keys(jax.random.key(6), 40), jnp.tile(jnp.arange(100, dtype=jnp.int32), (40, 1)), num_components=3)
    drawn = np.argmax(log_priors + np.asarray(noise), axis=-1)
    shares = np.bincount(drawn.ravel(), minlength=3) / drawn.size
    assert (np.abs(shares - np.exp(log_priors)) < 5 * np.sqrt(np.exp(log_priors) * (1 - np.exp(log_priors)) / drawn.size)).all()
