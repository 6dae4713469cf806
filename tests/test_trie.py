"""The trie against a dict of prefixes, and its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from reanchor_jax.decoding.attach import Paths
from reanchor_jax.decoding.trie import Trie, merge

ROWS, PATHS, SLOTS, PLACES = 31, 6, 5, 9
FULL = 1 + PATHS * (PLACES - 1)  # no set of paths has more nodes


@functools.cache
def jitted(num_nodes):
    return jax.jit(functools.partial(merge, num_nodes=num_nodes))


def drawn(seed, *, vocab_size, filler=0):
    rng = np.random.default_rng(seed)
    rows = [oracle.random_paths(rng, num_paths=PATHS, block_size=SLOTS, vocab_size=vocab_size) for _ in range(ROWS)]
    tokens = np.full((ROWS, PATHS, PLACES), filler, np.int32)
    for row, paths in enumerate(rows):
        for index, path in enumerate(paths):
            tokens[row, index, : len(path)] = path
    return rows, Paths(tokens=jnp.asarray(tokens), lengths=jnp.asarray([[len(path) for path in paths] for paths in rows]))


def assert_tries_equal(trie: Trie, expected: Trie):
    for name in Trie._fields:
        np.testing.assert_array_equal(getattr(trie, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("num_nodes", [SLOTS, 11, FULL])
def test_merge_equals_a_dict_of_prefixes(num_nodes):
    """SLOTS and 11 nodes are too few for most rows: what is dropped is the end of the node order, and is counted."""
    num_dropped = 0
    for seed in range(12):
        rows, paths = drawn(seed, vocab_size=2 + seed % 3)
        trie = jitted(num_nodes)(paths)
        assert_tries_equal(trie, oracle.stack([oracle.merge(row) for row in rows], num_nodes))
        num_dropped += int(trie.num_dropped.sum())
    assert (num_dropped == 0) == (num_nodes == FULL)


@pytest.mark.parametrize("num_nodes", [SLOTS, 11, FULL])
def test_parents_precede_children_siblings_differ_and_the_baseline_is_whole(num_nodes):
    for seed in range(100, 106):
        rows, paths = drawn(seed, vocab_size=3)
        trie = jax.tree.map(np.asarray, jitted(num_nodes)(paths))
        for row in range(ROWS):
            count = trie.is_node[row].sum()
            assert trie.is_node[row, :count].all()
            parents, depths, tokens = trie.parents[row, :count], trie.depths[row, :count], trie.tokens[row, :count]
            assert (parents[1:] < np.arange(1, count)).all()
            assert (depths[1:] == depths[parents[1:]] + 1).all()
            children = list(zip(parents[1:].tolist(), tokens[1:].tolist(), strict=True))
            assert len(set(children)) == len(children)
            assert tokens[:SLOTS].tolist() == rows[row][0]
            assert (trie.blocks[row, :SLOTS] == 0).all()
            assert parents[:SLOTS].tolist() == [0, *range(SLOTS - 1)]


def test_what_stands_behind_a_path_is_not_read():
    for filler in (1, -7, np.iinfo(np.int32).max):
        clean, garbage = drawn(5, vocab_size=3)[1], drawn(5, vocab_size=3, filler=filler)[1]
        assert_tries_equal(jitted(FULL)(garbage), jitted(FULL)(clean))


def test_padding_holds_its_documented_values():
    _, paths = drawn(9, vocab_size=3)
    trie = jax.tree.map(np.asarray, jitted(FULL)(paths))
    padding = ~trie.is_node
    assert padding.any()
    for name in ("tokens", "parents", "depths", "blocks", "is_baseline"):
        assert (getattr(trie, name)[padding] == 0).all()
    rows, nodes = np.nonzero(padding)
    assert (trie.ancestors[rows, nodes] == np.eye(FULL, dtype=bool)[nodes]).all()
    assert not trie.ancestors.transpose(0, 2, 1)[padding].sum(axis=-1).max() > 1


def test_three_paths_by_hand():
    paths = Paths(tokens=jnp.asarray([[[5, 6, 7, 0], [5, 6, 8, 9], [5, 6, 8, 4]]]), lengths=jnp.asarray([[3, 4, 4]]))
    trie = jitted(5)(paths)
    assert trie.tokens.tolist() == [[5, 6, 7, 8, 9]]
    assert trie.parents.tolist() == [[0, 0, 1, 1, 3]]
    assert trie.depths.tolist() == [[0, 1, 2, 2, 3]]
    assert trie.blocks.tolist() == [[0, 0, 0, 1, 1]]
    assert trie.num_dropped.tolist() == [1]
