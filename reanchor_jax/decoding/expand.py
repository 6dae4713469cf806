"""Grow a trie of a given number of nodes from what the drafter holds likely at every slot, best prefix first.

In: the likeliest tokens of every slot of every block, and the blocks' anchors.
Out: Trie.
Source: DDTree (Ringel & Romano, arXiv 2604.12989) Algorithm 1 for one block: the N most probable prefixes under its marginals. Shifted
    blocks join the same order: where a prefix of the baseline ends on a block's anchor token, the block's first slot continues it.
    A heap would take N turns one after another; here all prefixes of one length are taken at once. From one block the result is the heap's;
    where many shifted blocks continue one prefix alike, they share the N places of a length, and a few unlikely nodes may differ.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.trie import Trie


class Candidates(NamedTuple):
    """The likeliest tokens of every drafted slot, the likeliest first.

    log_probs: nats, given that the block's slots before it are right.
    anchors: first token of each block. is_block: False for padding; block 0 is the baseline.
    """

    tokens: Int[Array, "B M K1 Q"]
    log_probs: Float[Array, "B M K1 Q"]
    anchors: Int[Array, "B M"]
    is_block: Bool[Array, "B M"]


class _Heads(NamedTuple):
    """Places from which prefixes of one length grow on, the best first. Two heads on one node are two blocks that continue it.

    scores: nats; -inf for none. nodes: entry of the node it stands on. blocks, slots: slot of the block that comes next.
    is_spine: the baseline's likeliest tokens so far. is_open: shifted blocks whose anchor token the prefix does not hold yet.
    """

    scores: Float[Array, " W"]
    nodes: Int[Array, " W"]
    blocks: Int[Array, " W"]
    slots: Int[Array, " W"]
    is_spine: Bool[Array, " W"]
    is_open: Bool[Array, "W M"]


class _Entries(NamedTuple):
    """Nodes that may be taken, W of every depth.

    keys: nats; inf for the spine, -inf for none. parents: entry of the parent; the root is 0.
    """

    keys: Float[Array, " W"]
    parents: Int[Array, " W"]
    tokens: Int[Array, " W"]
    blocks: Int[Array, " W"]
    is_spine: Bool[Array, " W"]


@jax.named_scope("expand")
def expand(
    candidates: Candidates,
    *,
    num_nodes: int,
    log_reliability: float = 0.0,
    has_spine: bool = True,
    noise: Float[Array, "B P V"] | None = None,
    is_sampled: Bool[Array, " B"] | None = None,
) -> Trie:
    """Take the num_nodes best prefixes of every row, the empty one (the anchor) included.

    A prefix scores the sum of its tokens' log-probabilities, and log_reliability where it goes over to a shifted block: at the first token
    equal to the block's anchor. One token under one node is one node, whichever blocks propose it, and all of them continue it.
    has_spine: the baseline's likeliest tokens come first, whatever they score; they are nodes 0 .. K1.
    noise: of the tokens 1, 2, ... places after the anchor; in rows where is_sampled it is added to a slot's log-probabilities, which then
        sum to 1 over its candidates.
    Ties go to the shorter prefix, then to the better parent, then to the likelier token; at most num_nodes prefixes of a length grow on.
    """

    def row(candidates, noise, is_sampled):
        return _expand_row(candidates, noise, is_sampled, num_nodes=num_nodes, log_reliability=log_reliability, has_spine=has_spine)

    axes = (0, None if noise is None else 0, None if is_sampled is None else 0)
    return jax.vmap(row, in_axes=axes)(candidates, noise, is_sampled)


def _expand_row(candidates: Candidates, noise, is_sampled, *, num_nodes: int, log_reliability: float, has_spine: bool) -> Trie:
    num_blocks, num_drafts, num_ranks = candidates.tokens.shape
    width = num_nodes

    def rank(scores, is_spine):
        return jnp.where(is_spine & has_spine, jnp.inf, scores)

    is_shifted = candidates.is_block & (jnp.arange(num_blocks) > 0)

    def attach(own: _Heads, tokens: Int[Array, " W"]) -> _Heads:
        """The heads and those of shifted blocks that begin here, the best `width` of both."""
        if num_blocks == 1:
            return own
        is_baseline = (own.blocks == 0) & (own.scores > -jnp.inf)
        is_here = own.is_open & (tokens[:, None] == candidates.anchors[None, :]) & is_baseline[:, None]
        own = own._replace(is_open=own.is_open & ~is_here)
        begun = jnp.where(is_here, own.scores[:, None] + log_reliability, -jnp.inf).reshape(-1)
        keys, chosen = jax.lax.top_k(jnp.concatenate([rank(own.scores, own.is_spine), begun]), width)
        is_own = chosen < width
        head = jnp.where(is_own, chosen, (chosen - width) // num_blocks)
        picked = jax.tree.map(lambda field: field[head], own)
        return _Heads(
            scores=jnp.where(is_own, picked.scores, keys),
            nodes=picked.nodes,
            blocks=jnp.where(is_own, picked.blocks, (chosen - width) % num_blocks),
            slots=jnp.where(is_own, picked.slots, 0),
            is_spine=picked.is_spine & is_own,
            is_open=picked.is_open,
        )

    def deepen(heads: _Heads, depth: Int[Array, ""]) -> tuple[_Heads, _Entries]:
        slots = jnp.minimum(heads.slots, num_drafts - 1)
        tokens, log_probs = candidates.tokens[heads.blocks, slots], candidates.log_probs[heads.blocks, slots]
        if noise is not None:
            perturbed = log_probs + noise[depth - 1][tokens]
            perturbed = perturbed - jax.nn.logsumexp(perturbed, axis=-1, keepdims=True)
            log_probs = jnp.where(is_sampled, perturbed, log_probs)
        scores = jnp.where((heads.slots < num_drafts)[:, None], heads.scores[:, None] + log_probs, -jnp.inf)
        is_spine = (heads.is_spine & (heads.slots < num_drafts))[:, None] & (jnp.arange(num_ranks) == 0)[None, :]
        keys, chosen = jax.lax.top_k(rank(scores, is_spine).reshape(-1), width)
        parent = chosen // num_ranks
        tokens, scores, is_spine = (field.reshape(-1)[chosen] for field in (tokens, scores, is_spine))
        nodes = heads.nodes[parent]
        is_same = (nodes[:, None] == nodes[None, :]) & (tokens[:, None] == tokens[None, :])
        first = jnp.argmax(is_same, axis=1).astype(jnp.int32)
        entries = _Entries(
            keys=jnp.where(first == jnp.arange(width), keys, -jnp.inf),
            parents=nodes,
            tokens=tokens,
            blocks=heads.blocks[parent],
            is_spine=is_spine,
        )
        own = _Heads(
            scores=scores,
            nodes=1 + (depth - 1) * width + first,
            blocks=heads.blocks[parent],
            slots=heads.slots[parent] + 1,
            is_spine=is_spine,
            is_open=heads.is_open[parent],
        )
        return attach(own, tokens), entries

    is_root = jnp.arange(width) == 0
    root = _Heads(
        scores=jnp.where(is_root, 0.0, -jnp.inf),
        nodes=jnp.zeros((width,), jnp.int32),
        blocks=jnp.zeros((width,), jnp.int32),
        slots=jnp.zeros((width,), jnp.int32),
        is_spine=is_root,
        is_open=jnp.broadcast_to(is_shifted, (width, num_blocks)),
    )
    heads = attach(root, jnp.broadcast_to(candidates.anchors[0], (width,)))
    # a shifted block begins at the baseline's last token at the latest
    depths = jnp.arange(1, num_drafts * min(num_blocks, 2) + 1, dtype=jnp.int32)
    _, entries = jax.lax.scan(deepen, heads, depths)
    return _take(entries, candidates.anchors[0], num_nodes)


def _take(entries: _Entries, anchor: Int[Array, ""], num_nodes: int) -> Trie:
    """The best entries of all depths [D W] as a trie: no child beats its parent, so parents precede children."""
    num_depths, width = entries.keys.shape
    keys, chosen = jax.lax.top_k(entries.keys.reshape(-1), num_nodes - 1)
    is_node = jnp.concatenate([jnp.ones((1,), bool), keys > -jnp.inf])
    ids = jnp.concatenate([jnp.zeros((1,), jnp.int32), chosen.astype(jnp.int32) + 1])

    def field(values, root):
        values = jnp.concatenate([jnp.asarray(root, values.dtype)[None], values.reshape(-1)[chosen]])
        return jnp.where(is_node, values, jnp.zeros((), values.dtype))

    parent_ids = field(entries.parents, 0)
    is_parent = (parent_ids[:, None] == ids[None, :]) & is_node[None, :]
    parents = jnp.where(is_node, jnp.argmax(is_parent, axis=1), 0).astype(jnp.int32)
    index = jnp.arange(num_nodes, dtype=jnp.int32)
    ancestors = jnp.eye(num_nodes, dtype=bool) | ((parents[:, None] == index[None, :]) & is_node[:, None])
    # each turn doubles how far up a node sees
    for _ in range(max(num_depths - 1, 0).bit_length()):
        reach = ancestors.astype(jnp.float32)
        ancestors = (reach @ reach) > 0
    return Trie(
        tokens=field(entries.tokens, anchor),
        parents=parents,
        depths=jnp.where(is_node, (ids + width - 1) // width, 0),
        blocks=field(entries.blocks, 0),
        is_baseline=is_node & field(entries.is_spine, True),
        is_node=is_node,
        ancestors=ancestors,
        num_dropped=jnp.int32(0),
    )
