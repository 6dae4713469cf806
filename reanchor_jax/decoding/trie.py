"""Merge candidate paths into a trie of fixed capacity.

In: Paths, the baseline first.
Out: Trie. Two paths share a node at depth k iff they agree on every token up to k; a node belongs to the first path that has it.
Source: ReAnchor Algorithm 1 (line 18); built from longest common prefixes, without loops, sorts or scatters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reanchor_jax.decoding.attach import Paths


class Trie(NamedTuple):
    """Candidate continuations of the anchor. Node 0 is the anchor; parents precede children.

    tokens: token id of each node; padding holds 0.
    parents: index of each node's parent; 0 for the root and for padding.
    depths: tokens between the node and the anchor; the root and padding have 0.
    blocks: the block whose draft the node is; 0 is the baseline's.
    is_baseline: the nodes of the baseline block's own tokens, anchor included.
    is_node: False for padding.
    ancestors: [n, m] is True where m is n or an ancestor of n; a padding node sees itself alone.
    num_dropped: nodes left out because the capacity was reached.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    depths: Int[Array, "B N"]
    blocks: Int[Array, "B N"]
    is_baseline: Bool[Array, "B N"]
    is_node: Bool[Array, "B N"]
    ancestors: Bool[Array, "B N N"]
    num_dropped: Int[Array, " B"]


@jax.named_scope("merge")
def merge(paths: Paths, *, num_nodes: int) -> Trie:
    """Merge every row's paths. Nodes come path by path, shallow first, so what exceeds num_nodes is dropped without leaving an orphan."""
    return jax.vmap(lambda tokens, lengths: _merge_row(tokens, lengths, num_nodes))(*paths)


def _merge_row(tokens: Int[Array, "M P"], lengths: Int[Array, " M"], num_nodes: int) -> Trie:
    num_paths, num_places = tokens.shape
    differs = tokens[:, None, :] != tokens[None, :, :]
    agreement = jnp.where(jnp.any(differs, axis=-1), jnp.argmax(differs, axis=-1).astype(jnp.int32), num_places)
    # common[i, j]: tokens that paths i and j share from the anchor on
    common = jnp.minimum(agreement, jnp.minimum(lengths[:, None], lengths[None, :]))
    is_earlier = jnp.tri(num_paths, k=-1, dtype=bool)
    owned_before = jnp.max(jnp.where(is_earlier, common, 0), axis=1)
    new = jnp.maximum(lengths - owned_before, 0)
    end = jnp.cumsum(new)
    start = end - new

    index = jnp.arange(num_nodes, dtype=jnp.int32)
    is_node = index < end[-1]
    path = jnp.minimum(jnp.sum(index[:, None] >= end[None, :], axis=1, dtype=jnp.int32), num_paths - 1)
    path = jnp.where(is_node, path, 0)
    depth = jnp.where(is_node, index - start[path] + owned_before[path], 0)
    shared = jnp.where(jnp.eye(num_paths, dtype=bool), lengths, common)
    # lies_on[m, n]: node n is one of path m's tokens
    lies_on = (depth[None, :] < shared[:, path]) & is_node[None, :]
    ancestors = lies_on[path] & (depth[None, :] <= depth[:, None]) & is_node[:, None]
    parent = jnp.sum(jnp.where(ancestors & (depth[None, :] + 1 == depth[:, None]), index[None, :], 0), axis=1, dtype=jnp.int32)
    return Trie(
        tokens=jnp.where(is_node, tokens[path, depth], 0),
        parents=parent,
        depths=depth,
        blocks=path,
        is_baseline=is_node & (path == 0),
        is_node=is_node,
        ancestors=ancestors | jnp.eye(num_nodes, dtype=bool),
        num_dropped=jnp.maximum(end[-1] - num_nodes, 0),
    )
