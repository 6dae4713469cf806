"""Slow, readable twins of the decoding rooms: plain Python over lists, one row at a time.

In: paths as lists of tokens, target tokens as lists.
Out: nodes, walks and retained entries as lists; `stack` turns nodes into the library's Trie.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from reanchor_jax.decoding.trie import Trie
from reanchor_jax.decoding.walk import LENGTH, RUNNING, STOP


class Node(NamedTuple):
    """A prefix of at least one path. parent: index of the node one shorter. path: the first path that has the prefix."""

    token: int
    parent: int
    depth: int
    path: int


def merge(paths: list[list[int]]) -> list[Node]:
    """Nodes of every distinct prefix, in the order in which paths and then places bring them up."""
    nodes, index_of = [], {}
    for path, tokens in enumerate(paths):
        for depth, token in enumerate(tokens):
            prefix = tuple(tokens[: depth + 1])
            if prefix not in index_of:
                index_of[prefix] = len(nodes)
                nodes.append(Node(token=token, parent=index_of[prefix[:-1]] if depth else 0, depth=depth, path=path))
    return nodes


def is_ancestor(nodes: list[Node], older: int, younger: int) -> bool:
    """Whether `older` is `younger` or lies on the way from it to the root."""
    while younger != older and nodes[younger].depth:
        younger = nodes[younger].parent
    return younger == older


def walk(nodes: list[Node], target_tokens: list[int], node: int = 0) -> list[int]:
    """Nodes from the given one on, each the child that carries the target's token at the one before."""
    for child, (token, parent, depth, _) in enumerate(nodes):
        if depth and parent == node and token == target_tokens[node]:
            return [node, *walk(nodes, target_tokens, child)]
    return [node]


def cut(tokens: list[int], stop_token_ids: list[int], remaining: int) -> tuple[list[int], int]:
    """Tokens up to the first event, and which it was: a stop token (inclusive) or the budget; a stop token at the last place is a stop."""
    for count, token in enumerate(tokens, start=1):
        if token in stop_token_ids:
            return tokens[:count], STOP
        if count == remaining:
            return tokens[:count], LENGTH
    return tokens, RUNNING


def retain(nodes: list[Node], last: int, policy: str, limit: int) -> list[int]:
    """At most `limit` nodes retained behind the last accepted one, in node order."""
    deeper = [index for index, node in enumerate(nodes) if node.depth > nodes[last].depth]
    suffix = [index for index in deeper if nodes[index].path == 0]
    below = [index for index in deeper if is_ancestor(nodes, last, index)]
    if policy == "baseline":
        return suffix[:limit] if nodes[last].path == 0 else []
    if policy == "suffix":
        return suffix[:limit]
    if policy == "descendants":
        return sorted(sorted(below, key=lambda index: (nodes[index].depth, index))[:limit])
    chain = []
    if below:
        tip = min(below, key=lambda index: (-nodes[index].depth, nodes[index].path))
        chain = [index for index in below if is_ancestor(nodes, index, tip)]
    return (chain if policy == "deepest" else sorted({*chain, *suffix}))[:limit]


def find_site(baseline: list[int], block: list[int], offset: int, rule: str, scores: list[float], seconds: list[int] | None) -> int:
    """Index where a block joins the baseline, or -1. block: its tokens. seconds: second choices behind each index, or None."""
    matches = [index for index, token in enumerate(baseline) if token == block[0]]
    if rule == "original_offset":
        return offset if offset < len(baseline) else -1
    if rule == "original_offset_match":
        return offset if offset in matches else -1

    def agreement(index: int) -> int:
        pairs = list(zip(baseline[index + 1 :], block[1:], strict=False))
        return next((count for count, (one, other) in enumerate(pairs) if one != other), len(pairs))

    key = {
        "earliest": lambda index: -index,
        "longest_prefix": lambda index: (agreement(index), -index),
        "random": lambda index: scores[index],
    }[rule]
    if matches:
        return max(matches, key=key)
    return -1 if seconds is None or block[0] not in seconds else seconds.index(block[0]) + 1


def stack(rows: list[list[Node]], num_nodes: int) -> Trie:
    """The library's Trie of several rows; nodes past num_nodes are dropped."""
    shape = (len(rows), num_nodes)
    tokens, parents, depths, paths = (np.zeros(shape, np.int32) for _ in range(4))
    is_node = np.zeros(shape, bool)
    ancestors = np.broadcast_to(np.eye(num_nodes, dtype=bool), (*shape, num_nodes)).copy()
    for row, nodes in enumerate(rows):
        for index, node in enumerate(nodes[:num_nodes]):
            tokens[row, index], parents[row, index], depths[row, index], paths[row, index] = node
            is_node[row, index] = True
            for other in range(index):
                ancestors[row, index, other] = is_ancestor(nodes, other, index)
    dropped = np.asarray([max(len(nodes) - num_nodes, 0) for nodes in rows], np.int32)
    fields = (tokens, parents, depths, paths, is_node & (paths == 0), is_node, ancestors, dropped)
    return Trie(*(jnp.asarray(field) for field in fields))


def random_paths(rng: np.random.Generator, *, num_paths: int, block_size: int, vocab_size: int) -> list[list[int]]:
    """A baseline block and shifted blocks attached to it at random, by the rule of the library: prefix of the baseline, then the block."""
    baseline = rng.integers(vocab_size, size=block_size).tolist()
    paths = [baseline]
    for _ in range(num_paths - 1):
        site = int(rng.integers(-2, block_size))  # negative: the block found no site
        block = rng.integers(vocab_size, size=block_size).tolist()
        if rng.random() < 0.3:  # agree with the baseline for a while
            kept = int(rng.integers(block_size))
            block[: max(kept - max(site, 0), 0)] = baseline[max(site, 0) : kept]
        block[0] = baseline[max(site, 0)]
        paths.append([] if site < 0 else baseline[:site] + block)
    return paths
