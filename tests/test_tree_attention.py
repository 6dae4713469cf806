"""Attention against a dense softmax in float64, with NaN wherever the cache must not be read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.kernels import online
from reanchor_jax.kernels.parts import CachePart, DensePart
from reanchor_jax.kernels.tree_attention import attend

ROWS, COUNT, HEADS, GROUPS, SIZE, SLOTS = 7, 5, 6, 2, 3, 192
LENGTHS = [0, 1, 63, 64, 65, 130, SLOTS]

attend_jit = functools.cache(lambda window: jax.jit(functools.partial(attend, window=window)))


def drawn(seed, *, num_entries=(COUNT, 4)):
    """Queries at positions past each row's length, dense parts in which query t sees at least entry t of the first, and a cache."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    queries = normal(ROWS, COUNT, HEADS, SIZE)
    positions = np.asarray(LENGTHS)[:, None] + rng.integers(6, size=(ROWS, COUNT))
    parts = []
    for index, count in enumerate(num_entries):
        mask = rng.random((ROWS, COUNT, count)) < 0.5
        if index == 0:
            mask |= np.eye(COUNT, count, dtype=bool)
        parts.append(DensePart(keys_values=normal(ROWS, 2 * GROUPS, count, SIZE), mask=mask))
    return queries, positions.astype(np.int32), tuple(parts), normal(ROWS, 2 * GROUPS, SLOTS, SIZE)


def dense_attention(queries, positions, parts, cache, lengths, window, cap=None):
    result = np.zeros(queries.shape)
    for row, query, head in np.ndindex(ROWS, COUNT, HEADS):
        group = head // (HEADS // GROUPS)
        keys, values = [], []
        for part in parts:
            seen = np.flatnonzero(part.mask[row, query])
            keys.extend(part.keys_values[row, group, seen])
            values.extend(part.keys_values[row, GROUPS + group, seen])
        for slot in range(lengths[row]):
            if window is None or slot > positions[row, query] - window:
                keys.append(cache[row, group, slot])
                values.append(cache[row, GROUPS + group, slot])
        scores = np.asarray(keys, np.float64) @ queries[row, query, head] / np.sqrt(SIZE)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        result[row, query, head] = weights @ np.asarray(values, np.float64) / weights.sum()
    return result


def with_garbage(cache, lengths, value):
    cache = cache.copy()
    for row, length in enumerate(lengths):
        cache[row, :, length:] = value
    return cache


@pytest.mark.parametrize("window", [None, 1, 4, 64, 70, 1000])
def test_attention_equals_a_dense_softmax_over_visible_entries_alone(window):
    queries, positions, parts, cache = drawn(3)
    expected = dense_attention(queries, positions, parts, cache, LENGTHS, window)
    for value in (np.nan, np.inf, 1e30):
        part = CachePart(keys_values=with_garbage(cache, LENGTHS, value), lengths=np.asarray(LENGTHS, np.int32))
        np.testing.assert_allclose(attend_jit(window)(queries, positions, parts, cache=part), expected, atol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_chunks_of_any_size_make_the_same_attention(monkeypatch, window):
    queries, positions, parts, cache = drawn(4)
    expected = dense_attention(queries, positions, parts, cache, LENGTHS, window)
    part = CachePart(keys_values=with_garbage(cache, LENGTHS, np.nan), lengths=np.asarray(LENGTHS, np.int32))
    for few, largest in ((0, 128), (10**9, 1024)):  # 64 slots at once, and all of them
        monkeypatch.setattr(online, "_FEW_SCORES", few)
        monkeypatch.setattr(online, "_LARGEST_CHUNK", largest)
        got = jax.jit(functools.partial(attend, window=window))(queries, positions, parts, cache=part)
        np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize("few", [0, 10**9])
def test_a_window_that_begins_far_behind_meets_the_cache_s_end(monkeypatch, few):
    monkeypatch.setattr(online, "_FEW_SCORES", few)
    lengths = [130, 150, 170, 180, 185, 190, SLOTS]
    queries, _, parts, cache = drawn(6)
    positions = np.asarray(lengths, np.int32)[:, None] + np.arange(COUNT, dtype=np.int32)[None]
    part = CachePart(keys_values=with_garbage(cache, lengths, np.nan), lengths=np.asarray(lengths, np.int32))
    for window in (9, 60):  # from slot 64 on, read 128 at once: the end is met
        got = jax.jit(functools.partial(attend, window=window))(queries, positions, parts, cache=part)
        np.testing.assert_allclose(got, dense_attention(queries, positions, parts, cache, lengths, window), atol=2e-6)


@pytest.mark.parametrize(("lengths", "window"), [([1, 5, 20, 40, 64, 65, 65], None), ([126, 127, 130, 140, 150, 160, 129], 64)])
def test_the_last_slot_of_a_cache_and_the_first_of_a_window_are_read_wherever_chunks_end(monkeypatch, lengths, window):
    """65 committed slots leave one to the second chunk; a window that begins at slot 63 leaves one to the chunk before."""
    monkeypatch.setattr(online, "_FEW_SCORES", 0)
    queries, _, parts, cache = drawn(8)
    positions = np.repeat(np.asarray(lengths, np.int32)[:, None], COUNT, axis=1)
    part = CachePart(keys_values=with_garbage(cache, lengths, np.nan), lengths=np.asarray(lengths, np.int32))
    got = jax.jit(functools.partial(attend, window=window))(queries, positions, parts, cache=part)
    np.testing.assert_allclose(got, dense_attention(queries, positions, parts, cache, lengths, window), atol=2e-6)


def test_scores_are_squashed_by_a_cap():
    queries, positions, parts, cache = drawn(9)
    part = CachePart(keys_values=cache, lengths=np.asarray(LENGTHS, np.int32))
    got = jax.jit(functools.partial(attend, cap=0.7))(queries, positions, parts, cache=part)
    np.testing.assert_allclose(got, dense_attention(queries, positions, parts, cache, LENGTHS, None, cap=0.7), atol=2e-6)


@pytest.mark.parametrize("shape", [(0, COUNT), (ROWS, 0)])
def test_no_rows_and_no_queries_attend_to_nothing(shape):
    queries, positions, parts, cache = drawn(10)
    rows, count = shape
    parts = tuple(DensePart(part.keys_values[:rows], part.mask[:rows, :count]) for part in parts)
    part = CachePart(keys_values=cache[:rows], lengths=np.asarray(LENGTHS, np.int32)[:rows])
    got = attend(jnp.asarray(queries[:rows, :count]), jnp.asarray(positions[:rows, :count]), parts, cache=part, window=4)
    assert got.shape == (rows, count, HEADS, SIZE)


def test_derivatives_are_those_of_a_dense_softmax_backward_without_a_cache_and_forward_with_one():
    queries, positions, parts, cache = drawn(12)
    part = CachePart(keys_values=cache, lengths=np.asarray(LENGTHS, np.int32))
    toward = np.random.default_rng(0).standard_normal(queries.shape).astype(np.float32)
    step = 1e-4

    def slope(lengths):
        ends = (dense_attention(queries + sign * step * toward, positions, parts, cache, lengths, None) for sign in (1, -1))
        return (next(ends) - next(ends)) / (2 * step)

    _, forward = jax.jvp(lambda q: attend(q, positions, parts, cache=part), (jnp.asarray(queries),), (jnp.asarray(toward),))
    np.testing.assert_allclose(forward, slope(LENGTHS), atol=2e-3)
    backward = jax.grad(lambda q: attend(q, positions, parts).sum())(jnp.asarray(queries))
    np.testing.assert_allclose(np.sum(backward * toward), slope([0] * ROWS).sum(), rtol=2e-3)


def test_the_window_compares_positions_not_slots_of_this_call():
    """A query five positions past the length sees five slots fewer than one at the length."""
    queries, _, parts, cache = drawn(5)
    length, window = 130, 9
    positions = np.broadcast_to(length + np.arange(COUNT, dtype=np.int32), (ROWS, COUNT))
    part = CachePart(keys_values=cache, lengths=np.full(ROWS, length, np.int32))
    got = attend_jit(window)(queries, positions, parts, cache=part)
    np.testing.assert_allclose(got, dense_attention(queries, positions, parts, cache, [length] * ROWS, window), atol=2e-6)


def test_masked_entries_of_a_dense_part_weigh_nothing_however_large():
    queries, positions, parts, cache = drawn(7)
    part = CachePart(keys_values=cache, lengths=np.asarray(LENGTHS, np.int32))
    clean = attend_jit(None)(queries, positions, parts, cache=part)
    junk = []
    for dense in parts:
        unseen = ~dense.mask.any(axis=1)
        junk.append(dense._replace(keys_values=np.where(unseen[:, None, :, None], np.float32(1e18), dense.keys_values)))
    np.testing.assert_array_equal(attend_jit(None)(queries, positions, tuple(junk), cache=part), clean)


def test_attention_without_a_cache_is_attention_over_the_dense_parts():
    queries, positions, parts, cache = drawn(11)
    expected = dense_attention(queries, positions, parts, cache, [0] * ROWS, None)
    np.testing.assert_allclose(attend_jit(None)(queries, positions, parts), expected, atol=2e-6)
    np.testing.assert_allclose(attend_jit(None)(queries, positions, (parts[1], parts[0])), expected, atol=2e-6)


def test_large_scores_do_not_overflow():
    queries, positions, parts, cache = drawn(13)
    queries = queries * np.float32(1e4)
    part = CachePart(keys_values=cache, lengths=np.asarray(LENGTHS, np.int32))
    expected = dense_attention(queries, positions, parts, cache, LENGTHS, None)
    np.testing.assert_allclose(attend_jit(None)(queries, positions, parts, cache=part), expected, atol=1e-3)


def test_blocks_mapped_over_one_cache_equal_a_loop_over_them():
    queries, positions, parts, cache = drawn(17)
    part = CachePart(keys_values=with_garbage(cache, LENGTHS, np.nan), lengths=np.asarray(LENGTHS, np.int32))
    more = np.stack([queries, queries[::-1], 2 * queries], axis=1)
    mapped = jax.jit(jax.vmap(lambda q: attend(q, jnp.asarray(positions), parts, cache=part, window=70), in_axes=1, out_axes=1))(more)
    for block in range(3):
        alone = attend_jit(70)(more[:, block], positions, parts, cache=part)
        np.testing.assert_allclose(mapped[:, block], alone, atol=1e-6)


def test_bfloat16_in_bfloat16_out_with_float32_sums():
    queries, positions, parts, cache = drawn(19)
    queries = 32 * queries  # scores of size 50, which bfloat16 rounds by up to 0.1
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x, (queries, parts, cache))
    part = CachePart(keys_values=half[2], lengths=np.asarray(LENGTHS, np.int32))
    got = attend_jit(None)(half[0], positions, half[1], cache=part)
    assert got.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x), half)
    expected = dense_attention(rounded[0], positions, rounded[1], rounded[2], LENGTHS, None)
    # what is left is the rounding of scaled queries, weights and outputs; scores rounded to bfloat16 would be far off
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.06)
