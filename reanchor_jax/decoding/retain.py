"""Keep states of rejected nodes: each becomes the context of one shifted block of the next round.

In: the trie, the target's tokens, and where the walk ended.
Out: Retained: at most R nodes deeper than the last accepted one, with the chain of retained nodes each of them follows.
Source: ReAnchor section 3.2 (`baseline`); `deepest` and `both` retain from the whole trie.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.config import RetainPolicy
from reanchor_jax.decoding.trie import Trie


class Retained(NamedTuple):
    """Rejected states that the next round drafts from. Entry r makes one shifted block.

    tokens: the target's own token at the node: the block's anchor. Padding holds 0.
    offsets: distance of that anchor from the current one, 1 or more. Padding holds 1.
    features: the node's projected target states. Its position is the current anchor's + offset - 1.
    visible: [r, s] is True where the block of entry r sees the state of entry s: s is r itself or before it on its path.
    counts: entries in use.
    """

    tokens: Int[Array, "B R"]
    offsets: Int[Array, "B R"]
    features: Float[Array, "B R F"]
    visible: Bool[Array, "B R R"]
    counts: Int[Array, " B"]


def init_retained(num_rows: int, *, max_offsets: int, width: int, dtype: jnp.dtype) -> Retained:
    """Nothing retained."""
    return Retained(
        tokens=jnp.zeros((num_rows, max_offsets), jnp.int32),
        offsets=jnp.ones((num_rows, max_offsets), jnp.int32),
        features=jnp.zeros((num_rows, max_offsets, width), dtype),
        visible=jnp.zeros((num_rows, max_offsets, max_offsets), bool),
        counts=jnp.zeros((num_rows,), jnp.int32),
    )


@jax.named_scope("retain")
def retain(
    trie: Trie,
    target_tokens: Int[Array, "B N"],
    features: Float[Array, "B N F"],
    last_node: Int[Array, " B"],
    *,
    policy: RetainPolicy,
    max_offsets: int,
) -> Retained:
    """Select rejected nodes by policy.

    last_node: u, the node whose target token is the next anchor; k is its depth.
    baseline: baseline nodes deeper than k if u is one itself, else none. suffix: those nodes wherever u is.
    deepest: the longest chain below u; ties go to the lowest node. both: deepest and suffix. descendants: every node below u.
    Over max_offsets, later nodes are left out; of descendants the deepest ones.
    """
    return jax.vmap(lambda *row: _retain_row(*row, policy=policy, max_offsets=max_offsets))(trie, target_tokens, features, last_node)


def _retain_row(
    trie: Trie,
    target_tokens: Int[Array, " N"],
    features: Float[Array, "N F"],
    last_node: Int[Array, ""],
    *,
    policy: RetainPolicy,
    max_offsets: int,
) -> Retained:
    is_deeper = trie.is_node & (trie.depths > trie.depths[last_node])
    suffix = is_deeper & trie.is_baseline
    below = is_deeper & trie.ancestors[:, last_node]
    tip = jnp.argmax(jnp.where(below, trie.depths, -1))
    chain = below & trie.ancestors[tip] & below[tip]
    is_retained = {
        "baseline": suffix & trie.is_baseline[last_node],
        "suffix": suffix,
        "deepest": chain,
        "both": chain | suffix,
        "descendants": _shallowest(below, trie.depths, max_offsets),
    }[policy]
    rank = jnp.cumsum(is_retained.astype(jnp.int32))
    entries = jnp.arange(max_offsets, dtype=jnp.int32)
    is_entry = entries < rank[-1]
    # node of entry r: the one where the running count first reaches r + 1
    nodes = jnp.sum(rank[None, :] <= entries[:, None], axis=1, dtype=jnp.int32)
    nodes = jnp.where(is_entry, nodes, 0)
    visible = trie.ancestors[nodes][:, nodes] & is_entry[:, None] & is_entry[None, :]
    return Retained(
        tokens=jnp.where(is_entry, target_tokens[nodes], 0),
        offsets=jnp.where(is_entry, trie.depths[nodes] - trie.depths[last_node], 1),
        features=jnp.where(is_entry[:, None], features[nodes], jnp.zeros((), features.dtype)),
        visible=visible,
        counts=jnp.minimum(rank[-1], max_offsets),
    )


def _shallowest(is_chosen: Bool[Array, " N"], depths: Int[Array, " N"], count: int) -> Bool[Array, " N"]:
    """The first `count` of the chosen nodes by depth, then by index, so that none is kept without its chosen ancestors."""
    before = is_chosen[None, :] & (
        (depths[None, :] < depths[:, None]) | ((depths[None, :] == depths[:, None]) & jnp.tri(depths.size, k=-1, dtype=bool))
    )
    return is_chosen & (jnp.sum(before, axis=1) < count)
