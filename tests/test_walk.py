"""The walk against a recursive one, and its cut against a loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from reanchor_jax.decoding.walk import LENGTH, RUNNING, STOP, cut, walk

ROWS, PATHS, SLOTS, PLACES, NODES = 37, 6, 5, 9, 23

walk_jit = jax.jit(functools.partial(walk, num_places=PLACES))
cut_jit = jax.jit(cut)


def drawn(seed, *, vocab_size=3):
    """Tries, and target tokens that follow a random path of the trie more often than not."""
    rng = np.random.default_rng(seed)
    rows = [oracle.merge(oracle.random_paths(rng, num_paths=PATHS, block_size=SLOTS, vocab_size=vocab_size))[:NODES] for _ in range(ROWS)]
    target = rng.integers(vocab_size, size=(ROWS, NODES)).astype(np.int32)
    for row, nodes in enumerate(rows):
        tip = int(rng.integers(len(nodes)))
        while tip and rng.random() < 0.9:
            target[row, nodes[tip].parent] = nodes[tip].token
            tip = nodes[tip].parent
    return rng, rows, target


def running(**overrides):
    given = {
        "stop_token_ids": jnp.full(2, -1),
        "remaining": jnp.full(ROWS, 1000),
        "finish": jnp.zeros(ROWS, jnp.int32),
        **overrides,
    }
    return {name: jnp.asarray(value, jnp.int32) for name, value in given.items()}


def test_the_walk_equals_a_recursive_one():
    depths = set()
    for seed in range(20):
        _, rows, target = drawn(seed)
        walked = walk_jit(oracle.stack(rows, NODES), target, **running())
        for row, nodes in enumerate(rows):
            expected = oracle.walk(nodes, target[row].tolist())
            assert walked.nodes[row].tolist() == expected + [0] * (PLACES - len(expected))
            assert walked.num_emitted[row] == len(expected)
            depths.add(len(expected) - 1)
        assert (walked.finish == RUNNING).all()
    assert depths >= set(range(7))


def test_the_walk_is_cut_at_the_earliest_of_stop_token_and_budget():
    reasons = set()
    for seed in range(40, 60):
        rng, rows, target = drawn(seed, vocab_size=4)
        stops = rng.integers(-1, 3, size=2)
        remaining = rng.integers(1, 7, size=ROWS)
        walked = walk_jit(oracle.stack(rows, NODES), target, **running(stop_token_ids=stops, remaining=remaining))
        for row, nodes in enumerate(rows):
            tokens = [int(target[row, node]) for node in oracle.walk(nodes, target[row].tolist())]
            kept, reason = oracle.cut(tokens, [stop for stop in stops.tolist() if stop >= 0], int(remaining[row]))
            assert (int(walked.num_emitted[row]), int(walked.finish[row])) == (len(kept), reason)
            reasons.add((reason, len(kept) < len(tokens)))
    assert reasons == {(RUNNING, False), (STOP, False), (STOP, True), (LENGTH, False), (LENGTH, True)}


def test_finished_rows_emit_nothing_and_keep_their_reason():
    _, rows, target = drawn(71)
    finish = np.arange(ROWS) % 3
    walked = walk_jit(oracle.stack(rows, NODES), target, **running(finish=finish, remaining=np.where(finish == LENGTH, 0, 5)))
    assert (np.asarray(walked.num_emitted)[finish != RUNNING] == 0).all()
    assert (np.asarray(walked.num_emitted)[finish == RUNNING] > 0).all()
    assert (np.asarray(walked.finish)[finish != RUNNING] == finish[finish != RUNNING]).all()


def test_padding_nodes_are_not_walked_whatever_they_hold():
    for seed in range(80, 90):
        _, rows, target = drawn(seed)
        trie = oracle.stack(rows, NODES)
        clean = walk_jit(trie, target, **running())
        for token in range(3):
            garbage = trie._replace(tokens=jnp.where(trie.is_node, trie.tokens, token))
            junk = np.where(trie.is_node, target, token).astype(np.int32)
            for one, other in zip(walk_jit(garbage, junk, **running()), clean, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_emitted", [1, 4, 7])
def test_cut_equals_a_loop_over_tokens(num_emitted):
    rng = np.random.default_rng(num_emitted)
    for _ in range(20):
        tokens = rng.integers(6, size=(ROWS, 7)).astype(np.int32)
        stops = rng.integers(-1, 6, size=3)
        remaining = rng.integers(1, 9, size=ROWS)
        counts, reasons = cut_jit(
            tokens, jnp.full(ROWS, num_emitted, jnp.int32), **running(stop_token_ids=np.where(stops == 5, -1, stops), remaining=remaining)
        )
        for row in range(ROWS):
            expected = oracle.cut(tokens[row, :num_emitted].tolist(), [s for s in stops.tolist() if 0 <= s < 5], int(remaining[row]))
            assert (int(counts[row]), int(reasons[row])) == (len(expected[0]), expected[1])


def test_a_stop_token_at_the_last_place_of_the_budget_is_a_stop():
    counts, reasons = cut(
        jnp.asarray([[8, 9, 3], [8, 3, 9], [3, 8, 9]], jnp.int32),
        jnp.full(3, 3, jnp.int32),
        stop_token_ids=jnp.asarray([3, -1], jnp.int32),
        remaining=jnp.full(3, 2, jnp.int32),
        finish=jnp.zeros(3, jnp.int32),
    )
    assert counts.tolist() == [2, 2, 1]
    assert reasons.tolist() == [LENGTH, STOP, STOP]
