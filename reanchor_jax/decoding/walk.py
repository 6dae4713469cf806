"""Follow the target's own tokens down the trie; cut at a stop token or at the row's budget.

In: a Trie and the target's token at every node.
Out: the path walked and how many tokens it emits. The emitted tokens are the target's own at the nodes walked, so the last is the bonus.
Source: sample-wise verification (ReAnchor, Preliminaries). Children of one node carry different tokens, so at most one of them matches.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from reanchor_jax.decoding.trie import Trie

RUNNING, STOP, LENGTH = 0, 1, 2  # finish reasons: none yet, a stop token, the token budget


class Walk(NamedTuple):
    """The accepted path of every row.

    nodes: node at each depth of the path, the anchor first; past the path they hold 0.
    num_emitted: tokens emitted this round, bonus included: nodes[:num_emitted] each emit the target's token there. 0 for finished rows.
    finish: RUNNING, STOP or LENGTH after this round.
    """

    nodes: Int[Array, "B P"]
    num_emitted: Int[Array, " B"]
    finish: Int[Array, " B"]


@jax.named_scope("walk")
def walk(
    trie: Trie,
    target_tokens: Int[Array, "B N"],
    *,
    num_places: int,
    stop_token_ids: Int[Array, " Z"],
    remaining: Int[Array, " B"],
    finish: Int[Array, " B"],
) -> Walk:
    """Walk from the anchor to the child that carries the target's token, until there is none.

    num_places: P, the longest possible path. remaining: tokens the row may still emit. A stop token is emitted and ends the row.
    """
    expected = jnp.take_along_axis(target_tokens, trie.parents, axis=1)
    is_broken = (trie.tokens != expected) & (jnp.arange(trie.tokens.shape[1]) > 0)[None, :]
    is_accepted = trie.is_node & ~jnp.any(trie.ancestors & is_broken[:, None, :], axis=-1)
    places = jnp.arange(num_places, dtype=jnp.int32)
    is_at = is_accepted[:, None, :] & (trie.depths[:, None, :] == places[None, :, None])
    nodes = jnp.sum(jnp.where(is_at, jnp.arange(trie.tokens.shape[1], dtype=jnp.int32), 0), axis=-1, dtype=jnp.int32)
    num_walked = jnp.sum(is_accepted, axis=1, dtype=jnp.int32)
    emitted = jnp.take_along_axis(target_tokens, nodes, axis=1)
    num_emitted, finish = cut(emitted, num_walked, stop_token_ids=stop_token_ids, remaining=remaining, finish=finish)
    return Walk(nodes=nodes, num_emitted=num_emitted, finish=finish)


def cut(
    emitted: Int[Array, "B P"],
    num_emitted: Int[Array, " B"],
    *,
    stop_token_ids: Int[Array, " Z"],
    remaining: Int[Array, " B"],
    finish: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Shorten what a row emits to its first stop token (inclusive) and its budget; the earlier event is the finish reason.

    A row that had finished emits nothing and keeps its reason. Unused entries of stop_token_ids hold -1.
    """
    places = jnp.arange(emitted.shape[1], dtype=jnp.int32)
    is_stop = _is_in(emitted, stop_token_ids) & (places[None, :] < num_emitted[:, None])
    until_stop = jnp.where(jnp.any(is_stop, axis=1), jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, jnp.iinfo(jnp.int32).max)
    kept = jnp.minimum(jnp.minimum(num_emitted, remaining), until_stop)
    reason = jnp.where(until_stop <= kept, STOP, jnp.where(remaining <= kept, LENGTH, RUNNING))
    is_running = finish == RUNNING
    return jnp.where(is_running, kept, 0), jnp.where(is_running, reason, finish).astype(jnp.int32)


def _is_in(tokens: Int[Array, "B P"], stop_token_ids: Int[Array, " Z"]) -> Bool[Array, "B P"]:
    return jnp.any(tokens[..., None] == stop_token_ids[None, None, :], axis=-1)
