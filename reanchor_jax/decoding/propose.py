"""Draft, and make one trie of it: the candidates of a round.

In: models, a DecodeState, noise of the tokens to come, the number of blocks to draft.
Out: Proposal.
Source: ReAnchor section 3.2 where each block is one path; DDTree and its merge with shifted blocks where `expand` says so.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.cache import Committed
from reanchor_jax.decoding.attach import make_paths
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.draft import draft_blocks, draft_candidates
from reanchor_jax.decoding.expand import expand
from reanchor_jax.decoding.retain import Retained
from reanchor_jax.decoding.state import DecodeState
from reanchor_jax.decoding.trie import Trie, merge
from reanchor_jax.models.drafter import Drafter
from reanchor_jax.models.target import Target


class Proposal(NamedTuple):
    """What the target is asked to verify.

    num_attached: shifted blocks whose anchor token the baseline, or a tree grown from it, holds.
    block_tokens: tokens of every block, its anchor first; of a grown tree, each slot's likeliest. M is the config's largest number of
        blocks, whatever was drafted; padding blocks hold anything. None unless the config asks for a trace.
    """

    trie: Trie
    num_attached: Int[Array, " B"]
    block_tokens: Int[Array, "B M K"] | None


def propose(
    target: Target,
    drafter: Drafter,
    state: DecodeState,
    retained: Retained,
    noise: Float[Array, "B P V"],
    *,
    is_running: Bool[Array, " B"],
    num_blocks: int,
    config: DecodeConfig,
) -> Proposal:
    """Draft the baseline and num_blocks - 1 shifted blocks from the retained states, and join them. config is resolved."""
    committed = Committed(layers=state.drafter_cache, lengths=state.lengths)
    given = (target, drafter, state.anchors, committed, retained, state.keys, state.sampling, noise)
    if config.expand == "none":
        drafted = draft_blocks(*given, is_running=is_running, num_blocks=num_blocks, config=config)
        trie = merge(make_paths(*drafted, extent=config.extent), num_nodes=config.num_nodes)
        is_attached = (drafted.sites[:, 1:] >= 0) & (drafted.kept[:, 1:] > 0)
        block_tokens = drafted.tokens
    else:
        candidates = draft_candidates(*given, num_blocks=num_blocks, config=config)
        is_coupled = config.draft_choice == "coupled"
        trie = expand(
            candidates,
            num_nodes=config.num_nodes,
            log_reliability=math.log(config.reliability) if config.reliability else -math.inf,
            # a chain that fills the tree leaves no room for likelier nodes
            has_spine=config.num_nodes >= 2 * drafter.config.block_size,
            noise=state.sampling.temperature[:, None, None] * noise if is_coupled else None,
            is_sampled=state.sampling.temperature > 0 if is_coupled else None,
        )
        is_here = (candidates.anchors[:, 1:, None] == trie.tokens[:, None, :]) & (trie.is_node & (trie.blocks == 0))[:, None, :]
        is_attached = jnp.any(is_here, axis=-1) & candidates.is_block[:, 1:]
        block_tokens = jnp.concatenate([candidates.anchors[..., None], candidates.tokens[..., 0]], axis=-1)
    missing = 1 + config.max_offsets - num_blocks
    return Proposal(
        trie=trie,
        num_attached=jnp.sum(is_attached, axis=1, dtype=jnp.int32),
        block_tokens=jnp.pad(block_tokens, ((0, 0), (0, missing), (0, 0))) if config.has_trace else None,
    )
