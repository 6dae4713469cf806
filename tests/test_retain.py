"""Retention policies against lists of nodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from reanchor_jax.decoding.retain import init_retained, retain

ROWS, PATHS, SLOTS, NODES, WIDTH = 29, 6, 5, 23, 3
EVERYTHING = NODES  # no policy retains more


@functools.cache
def jitted(policy, max_offsets):
    return jax.jit(functools.partial(retain, policy=policy, max_offsets=max_offsets))


def drawn(seed):
    rng = np.random.default_rng(seed)
    rows = [oracle.merge(oracle.random_paths(rng, num_paths=PATHS, block_size=SLOTS, vocab_size=3))[:NODES] for _ in range(ROWS)]
    target = rng.integers(100, size=(ROWS, NODES)).astype(np.int32)
    features = rng.standard_normal((ROWS, NODES, WIDTH)).astype(np.float32)
    last = np.asarray([rng.integers(len(nodes)) for nodes in rows], np.int32)
    return rows, target, features, last


@pytest.mark.parametrize("max_offsets", [1, 4, EVERYTHING])
@pytest.mark.parametrize("policy", ["baseline", "suffix", "deepest", "both", "descendants"])
def test_retained_entries_equal_the_policy_written_over_lists(policy, max_offsets):
    counts = set()
    for seed in range(12):
        rows, target, features, last = drawn(seed)
        # whatever is not retained must not be read: padding and accepted nodes alike
        hidden = features.copy()
        chosen = [oracle.retain(nodes, int(u), policy, max_offsets) for nodes, u in zip(rows, last, strict=True)]
        for row, entries in enumerate(chosen):
            hidden[row, [node for node in range(NODES) if node not in entries]] = np.nan
        kept = jax.tree.map(np.asarray, jitted(policy, max_offsets)(oracle.stack(rows, NODES), target, hidden, last))
        for row, entries in enumerate(chosen):
            nodes, padding = rows[row], max_offsets - len(entries)
            counts.add(len(entries))
            assert kept.counts[row] == len(entries)
            assert kept.tokens[row].tolist() == [int(target[row, node]) for node in entries] + [0] * padding
            assert kept.offsets[row].tolist() == [nodes[node].depth - nodes[last[row]].depth for node in entries] + [1] * padding
            np.testing.assert_array_equal(kept.features[row, : len(entries)], features[row, entries])
            assert (kept.features[row, len(entries) :] == 0).all()
            visible = np.zeros((max_offsets, max_offsets), bool)
            for r, younger in enumerate(entries):
                for s, older in enumerate(entries):
                    visible[r, s] = oracle.is_ancestor(nodes, older, younger)
            np.testing.assert_array_equal(kept.visible[row], visible)
    assert {0, 1, max_offsets} <= counts | {EVERYTHING}


def test_a_tie_of_depth_goes_to_the_lowest_path():
    nodes = oracle.merge([[1, 2], [1, 3, 4], [1, 5, 6]])
    target = jnp.arange(50, 50 + len(nodes), dtype=jnp.int32)[None]
    features = jnp.zeros((1, len(nodes), WIDTH))
    kept = jitted("deepest", 3)(oracle.stack([nodes], len(nodes)), target, features, jnp.asarray([0]))
    assert kept.counts.tolist() == [2]
    assert kept.tokens.tolist() == [[52, 53, 0]]
    assert kept.offsets.tolist() == [[1, 2, 1]]


def test_the_first_entry_of_a_chain_stands_one_behind_the_new_anchor():
    """The node behind the last accepted one was computed at the position where the new anchor now stands."""
    nodes = oracle.merge([[1, 2, 3, 4, 5]])
    target = jnp.asarray([[2, 9, 7, 8, 6]], jnp.int32)
    kept = jitted("baseline", 6)(oracle.stack([nodes], 5), target, jnp.zeros((1, 5, WIDTH)), jnp.asarray([1]))
    assert kept.tokens.tolist() == [[7, 8, 6, 0, 0, 0]]
    assert kept.offsets.tolist() == [[1, 2, 3, 1, 1, 1]]
    np.testing.assert_array_equal(kept.visible[0, :3, :3], np.tril(np.ones((3, 3), bool)))
    assert not kept.visible[0, 3:].any()
    assert not kept.visible[0, :, 3:].any()


def test_nothing_is_retained_at_the_start():
    empty = init_retained(3, max_offsets=5, width=WIDTH, dtype=jnp.float32)
    nodes = oracle.merge([[1]])
    kept = jitted("both", 5)(oracle.stack([nodes] * 3, 2), jnp.ones((3, 2), jnp.int32), jnp.ones((3, 2, WIDTH)), jnp.zeros(3, jnp.int32))
    for one, other in zip(kept, empty, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
