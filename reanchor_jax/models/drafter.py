"""DFlash block-diffusion drafter: target states become keys and values of every layer; one pass drafts a whole block.

In: tapped target states [B T ED] (projected once into features), block token embeddings, a context cache it only reads.
Out: features [B T D]; context keys and values per layer; block states [B K D] for the target's own head.
Source: z-lab DFlash (arXiv 2602.06036): KV injection, `hidden_norm(fc(taps))`; the block is [anchor, mask x (K-1)].
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.cache import Committed
from reanchor_jax.config import DrafterConfig
from reanchor_jax.kernels.tree_attention import CachePart, DensePart
from reanchor_jax.models.layers import DecoderLayer, RMSNorm, linear
from reanchor_jax.models.target import Target


class BlockContext(NamedTuple):
    """Context of a block beside the cache: retained states, or the sequence in front of a training anchor.

    keys_values: per layer. positions: absolute. mask: entries the block sees.
    """

    keys_values: tuple[Float[Array, "B 2G N A"], ...]
    positions: Int[Array, "B N"]
    mask: Bool[Array, "B N"]


class Drafter(nnx.Module):
    """Block drafter without embedding or head of its own; it borrows the target's."""

    def __init__(self, config: DrafterConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.fusion = linear(len(config.target_layer_ids) * config.width, config.width, dtype=dtype, rngs=rngs)
        self.context_norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(
                    layer,
                    width=config.width,
                    num_heads=config.num_heads,
                    mlp_width=config.mlp_width,
                    has_qk_norm=True,
                    epsilon=config.norm_epsilon,
                    dtype=dtype,
                    rngs=rngs,
                )
                for layer in config.layers
            ]
        )
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype)

    def features(self, taps: Float[Array, "B T ED"]) -> Float[Array, "B T D"]:
        """Project tapped target states to context features, shared by all layers."""
        return self.context_norm(self.fusion(taps))

    def context_keys_values(self, features: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Float[Array, "B 2G T A"], ...]:
        """Keys and values of context features at their own positions, one array a layer. Features skip the layers' input norm."""
        return tuple(layer.attention.keys_values(features, positions) for layer in self.layers)

    def block_states(
        self,
        embeddings: Float[Array, "B K D"],
        positions: Int[Array, "B K"],
        *,
        committed: Committed | None = None,
        context: BlockContext | None = None,
    ) -> Float[Array, "B K D"]:
        """Run one block over the committed context and, optionally, further context entries.

        embeddings: of [anchor, mask, ...]; slot k stands at positions[:, k] and its state predicts the token there.
        committed: cache of context keys and values. context: further context beside it.
        """
        x = embeddings
        slots = jnp.arange(embeddings.shape[1], dtype=jnp.int32)
        for index, (layer, shape) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            inside = jnp.ones((1, slots.size, slots.size), bool)
            if shape.is_causal:
                inside = inside & (slots[None, None, :] <= slots[None, :, None])
            if shape.window is not None:
                inside = inside & (jnp.abs(slots[None, None, :] - slots[None, :, None]) < shape.window)
            others = ()
            if context is not None:
                visible = jnp.broadcast_to(context.mask[:, None, :], (x.shape[0], slots.size, context.mask.shape[-1]))
                if shape.window is not None:
                    visible = visible & (context.positions[:, None, :] > positions[:, :, None] - shape.window)
                others = (DensePart(keys_values=context.keys_values[index], mask=visible),)
            part = None if committed is None else CachePart(keys_values=committed.layers[index], lengths=committed.lengths)
            x, _ = layer(x, positions, inside, cache=part, others=others)
        return self.norm(x)


class Models(NamedTuple):
    """A target and, for speculative decoding, its drafter; a pytree that passes through `jit` as an argument."""

    target: Target
    drafter: Drafter | None
