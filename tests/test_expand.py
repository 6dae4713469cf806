"""Trees grown on the device against a heap that takes one prefix after another."""

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reanchor_jax.decoding.expand import Candidates, expand

RANKS = 7


def heap(tokens, log_probs, anchors, is_block, *, num_nodes, log_reliability, has_spine, noise=None):
    """Nodes (token, parent, depth, block, is baseline) in the order in which a best-first search takes them; the anchor first.

    A head is a place from which a block goes on: (node, block, next slot). Heads of one depth are ordered as they come off the heap;
    the first num_nodes of a depth may make nodes, and the first num_nodes, those of blocks that begin there counted in, may grow on.
    Scores are added up in float32, as the builder does.
    """
    num_blocks, num_drafts, num_ranks = tokens.shape
    nodes, node_of, made, grown = [(int(anchors[0]), 0, 0, 0, True)], {}, {}, {}
    # (is not spine, -score, depth, kind, order in its kind, rank or block): what stands first is taken first
    queue = []

    def grow(score, depth, node, block, slot, is_spine, is_open):
        order = grown.get(depth, 0)
        if order >= num_nodes:
            return
        grown[depth] = order + 1
        if slot < num_drafts:
            found = log_probs[block, slot]
            if noise is not None:
                found = found + noise[depth, tokens[block, slot]]
                found = found - np.log(np.exp(found, dtype=np.float64).sum()).astype(np.float32)
            for rank in range(num_ranks):
                child = np.float32(score + found[rank])
                if child == -np.inf:
                    continue
                leads = is_spine and rank == 0
                entry = (not (leads and has_spine), -child, depth + 1, 0, order, rank)
                heapq.heappush(queue, (*entry, node, block, slot + 1, int(tokens[block, slot, rank]), is_open, leads))

    def begin(score, depth, node, block, order, token, is_open):
        """Blocks whose anchor token this is begin behind it; what is left open."""
        if block != 0:
            return is_open
        found = [other for other in sorted(is_open) if anchors[other] == token]
        for other in found:
            begun = np.float32(score + np.float32(log_reliability))
            if begun > -np.inf:
                heapq.heappush(queue, (True, -begun, depth, 1, order, other, node, other, 0, token, frozenset(), False))
        return is_open - set(found)

    every = frozenset(block for block in range(1, num_blocks) if is_block[block])
    left = begin(np.float32(0), 0, 0, 0, 0, int(anchors[0]), every)
    grow(np.float32(0), 0, 0, 0, 0, True, left)
    while queue and len(nodes) < num_nodes:
        _, minus, depth, kind, _, _, node, block, slot, token, is_open, is_spine = heapq.heappop(queue)
        score = np.float32(-minus)
        if kind == 1:
            grow(score, depth, node, block, slot, False, is_open)
            continue
        order = made.get(depth, 0)
        if order >= num_nodes:
            continue
        made[depth] = order + 1
        if (node, token) not in node_of:
            node_of[node, token] = len(nodes)
            nodes.append((token, node, depth, block, is_spine))
        own = node_of[node, token]
        left = begin(score, depth, own, block, order, token, is_open)
        grow(score, depth, own, block, slot, is_spine, left)
    return nodes


def drawn(rng, *, num_blocks, num_drafts, vocab_size, is_tied):
    """Candidates of one row. is_tied: log-probabilities are multiples of 1/4, so that sums tie exactly."""
    logits = rng.standard_normal((num_blocks, num_drafts, vocab_size)).astype(np.float32) * rng.uniform(0.5, 3)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    if is_tied:
        log_probs = np.round(log_probs * 4) / 4
    tokens = np.argsort(-log_probs, axis=-1, kind="stable")[..., :RANKS]
    log_probs = np.take_along_axis(log_probs, tokens, axis=-1).astype(np.float32)
    anchors = rng.integers(vocab_size, size=num_blocks)
    is_block = np.arange(num_blocks) <= rng.integers(num_blocks)
    return Candidates(tokens=tokens.astype(np.int32), log_probs=log_probs, anchors=anchors.astype(np.int32), is_block=is_block)


@functools.cache
def jitted(num_nodes, log_reliability, has_spine):
    return jax.jit(functools.partial(expand, num_nodes=num_nodes, log_reliability=log_reliability, has_spine=has_spine))


def assert_equal(trie, row, nodes):
    count = len(nodes)
    assert trie.is_node[row].tolist() == [True] * count + [False] * (trie.is_node.shape[1] - count)
    fields = (trie.tokens, trie.parents, trie.depths, trie.blocks, trie.is_baseline)
    found = zip(*(field[row].tolist() for field in fields), strict=True)
    assert list(itertools.islice(found, count)) == nodes
    for index in range(count):
        above = set()
        node = index
        while True:
            above.add(node)
            if node == 0:
                break
            node = nodes[node][1]
        assert set(np.flatnonzero(trie.ancestors[row, index]).tolist()) == above
    for index in range(count, trie.is_node.shape[1]):
        assert np.flatnonzero(trie.ancestors[row, index]).tolist() == [index]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "num_nodes", "has_spine", "log_reliability"),
    [(1, 23, False, 0.0), (1, 23, True, 0.0), (4, 31, True, -0.5), (4, 31, False, 0.0)],
)
def test_trees_equal_a_heap(num_blocks, num_nodes, has_spine, log_reliability, is_tied):
    """A thousand of one block, as many of four; with few tokens anchors are met often, and several blocks propose the same token."""
    rng = np.random.default_rng(num_blocks + 2 * has_spine + is_tied)
    rows = [drawn(rng, num_blocks=num_blocks, num_drafts=5, vocab_size=11, is_tied=is_tied) for _ in range(250)]
    batch = Candidates(*(jnp.asarray(np.stack(field)) for field in zip(*rows, strict=True)))
    trie = jax.tree.map(np.asarray, jitted(num_nodes, log_reliability, has_spine)(batch))
    shifted = 0
    for row, candidates in enumerate(rows):
        nodes = heap(*candidates, num_nodes=num_nodes, log_reliability=log_reliability, has_spine=has_spine)
        assert_equal(trie, row, nodes)
        shifted += sum(block > 0 for *_, block, _ in nodes)
    assert (shifted > 0) == (num_blocks > 1)


def test_noise_of_the_place_where_a_token_will_stand_ranks_it():
    """Rows that are not sampled keep their own log-probabilities."""
    rng = np.random.default_rng(8)
    rows = [drawn(rng, num_blocks=3, num_drafts=4, vocab_size=11, is_tied=False) for _ in range(40)]
    batch = Candidates(*(jnp.asarray(np.stack(field)) for field in zip(*rows, strict=True)))
    noise = rng.gumbel(size=(40, 8, 11)).astype(np.float32)
    is_sampled = np.arange(40) % 3 > 0
    grow = jax.jit(functools.partial(expand, num_nodes=19, log_reliability=-0.3))
    trie = jax.tree.map(np.asarray, grow(batch, noise=noise, is_sampled=is_sampled))
    for row, candidates in enumerate(rows):
        given = noise[row] if is_sampled[row] else None
        assert_equal(trie, row, heap(*candidates, num_nodes=19, log_reliability=-0.3, has_spine=True, noise=given))


@pytest.mark.parametrize("has_spine", [False, True])
def test_shifted_blocks_of_no_reliability_leave_the_marginal_tree(has_spine):
    rng = np.random.default_rng(9)
    rows = [drawn(rng, num_blocks=4, num_drafts=5, vocab_size=11, is_tied=False) for _ in range(60)]
    batch = Candidates(*(jnp.asarray(np.stack(field)) for field in zip(*rows, strict=True)))
    alone = jax.tree.map(lambda field: field[:, :1], batch)
    merged, marginal = jitted(31, -np.inf, has_spine)(batch), jitted(31, 0.0, has_spine)(alone)
    for name, expected in marginal._asdict().items():
        np.testing.assert_array_equal(getattr(merged, name), expected, err_msg=name)
    assert not np.asarray(merged.num_dropped).any()
