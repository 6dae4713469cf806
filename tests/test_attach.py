"""Attachment against loops over lists."""

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.decoding.attach import find_sites, make_paths

ROWS, BLOCKS, SLOTS = 41, 6, 5

find_jit, make_jit = jax.jit(find_sites), jax.jit(make_paths)


def drawn(seed, *, vocab_size=4):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(vocab_size, size=(ROWS, BLOCKS, SLOTS)).astype(np.int32)
    counts = rng.integers(BLOCKS, size=ROWS)
    return blocks, np.arange(BLOCKS)[None] <= counts[:, None]


def test_sites_are_the_earliest_match_and_minus_one_without_one():
    for seed in range(20):
        blocks, is_block = drawn(seed)
        sites = np.asarray(find_jit(blocks[:, 0], blocks[:, :, 0], is_block))
        for row in range(ROWS):
            baseline = blocks[row, 0].tolist()
            for index in range(BLOCKS):
                anchor = int(blocks[row, index, 0])
                found = baseline.index(anchor) if anchor in baseline and is_block[row, index] else -1
                assert sites[row, index] == (0 if index == 0 else found)


def test_a_block_whose_anchor_is_the_current_anchor_stands_at_zero():
    sites = find_jit(jnp.asarray([[7, 3, 7, 5]]), jnp.asarray([[7, 7, 5, 9, 3]]), jnp.asarray([[True, True, True, True, False]]))
    assert sites.tolist() == [[0, 0, 3, -1, -1]]


def test_paths_are_baseline_prefixes_followed_by_blocks():
    rng = np.random.default_rng(3)
    for seed in range(20):
        blocks, _ = drawn(seed, vocab_size=50)
        sites = rng.integers(-1, SLOTS, size=(ROWS, BLOCKS)).astype(np.int32)
        sites[:, 0] = 0
        kept = np.where(sites < 0, 0, rng.integers(0, SLOTS + 1, size=(ROWS, BLOCKS))).astype(np.int32)
        paths = make_jit(blocks, sites, kept)
        assert paths.tokens.shape == (ROWS, BLOCKS, 2 * SLOTS - 1)
        for row in range(ROWS):
            for index in range(BLOCKS):
                site, count = sites[row, index], kept[row, index]
                expected = [] if count == 0 else [*blocks[row, 0, :site].tolist(), *blocks[row, index, :count].tolist()]
                assert paths.lengths[row, index] == len(expected)
                assert paths.tokens[row, index].tolist() == expected + [0] * (2 * SLOTS - 1 - len(expected))


def test_the_papers_example_attaches_behind_the_matching_token():
    """Baseline a b c d; a block re-anchored on c continues behind a b."""
    a, b, c, d, e, f, g = range(1, 8)
    blocks = jnp.asarray([[[a, b, c, d], [c, e, f, g]]])
    sites = find_jit(blocks[:, 0], blocks[:, :, 0], jnp.ones((1, 2), bool))
    paths = make_jit(blocks, sites, jnp.asarray([[4, 4]]))
    assert sites.tolist() == [[0, 2]]
    assert paths.tokens.tolist() == [[[a, b, c, d, 0, 0, 0], [a, b, c, e, f, g, 0]]]
    assert paths.lengths.tolist() == [[4, 6]]
