"""One target pass over the trie.

In: a Trie, the target cache (read only), per-position noise.
Out: the target's token at every node, its log-probabilities, projected features, and the nodes' keys and values.
Source: tree attention (SpecInfer, Miao et al. 2024); a node of depth j stands at position length + j and sees its ancestors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from reanchor_jax.cache import Committed
from reanchor_jax.decoding.sampling import Choice, Sampling, choose
from reanchor_jax.decoding.trie import Trie
from reanchor_jax.models.drafter import Drafter
from reanchor_jax.models.target import Target


class Verified(NamedTuple):
    """The target's view of every node.

    choice: the target's own token after each node. features: projected target states. keys_values: per layer, in node order.
    """

    choice: Choice
    features: Float[Array, "B N F"]
    keys_values: tuple[Float[Array, "B 2G N A"], ...]


@jax.named_scope("verify")
def verify(
    target: Target,
    drafter: Drafter,
    trie: Trie,
    committed: Committed,
    sampling: Sampling,
    noise: Float[Array, "B P V"],
    is_banned: Bool[Array, "B N V"] | None = None,
) -> Verified:
    """Run the target over all nodes. All nodes of one depth draw with the same noise row: that of the position they predict.

    is_banned: tokens that may not be drawn behind each node; None bans none.
    """
    output = target(
        trie.tokens,
        committed.lengths[:, None] + trie.depths,
        trie.ancestors,
        committed=committed,
        target_layer_ids=drafter.config.target_layer_ids,
    )
    return Verified(
        choice=choose(target.logits(output.states), sampling, noise, trie.depths, is_banned),
        features=drafter.features(output.taps),
        keys_values=output.keys_values,
    )


def first_nodes(trie: Trie, num_nodes: int) -> Trie:
    """The trie cut to its first num_nodes slots. What is cut off must be padding."""
    return Trie(
        tokens=trie.tokens[:, :num_nodes],
        parents=trie.parents[:, :num_nodes],
        depths=trie.depths[:, :num_nodes],
        blocks=trie.blocks[:, :num_nodes],
        is_baseline=trie.is_baseline[:, :num_nodes],
        is_node=trie.is_node[:, :num_nodes],
        ancestors=trie.ancestors[:, :num_nodes, :num_nodes],
        num_dropped=trie.num_dropped,
    )


def prompt_mask(num_tokens: int) -> Bool[Array, "1 T T"]:
    """Causal mask of num_tokens consecutive tokens."""
    return jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))
