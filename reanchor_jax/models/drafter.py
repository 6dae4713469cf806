"""DFlash block-diffusion drafter: target states become keys and values of every layer; one pass drafts a whole block.

In: tapped target states [B T ED] (projected once into features), block token embeddings, a context cache it only reads.
Out: features [B T D]; context keys and values per layer; block states [B K D] for the target's own head.
Source: z-lab DFlash (arXiv 2602.06036): KV injection, `hidden_norm(fc(taps))`; the block is [anchor, mask x (K-1)].
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.config import DrafterConfig
from reanchor_jax.kernels.tree_attention import CachePart, DensePart
from reanchor_jax.models.layers import DecoderLayer, RMSNorm, linear
from reanchor_jax.models.target import Target


class Drafter(nnx.Module):
    """Block drafter without embedding or head of its own; it borrows the target's."""

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
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
        cache: tuple[Float[Array, "B 2G S A"], ...] | None = None,
        lengths: Int[Array, " B"] | None = None,
        context: tuple[Float[Array, "B 2G N A"], ...] = (),
        context_positions: Int[Array, "B N"] | None = None,
        context_mask: Bool[Array, "B N"] | None = None,
    ) -> Float[Array, "B K D"]:
        """Run one block over the committed context and, optionally, N further context entries.

        embeddings: of [anchor, mask, ...]; slot k stands at positions[:, k] and its state predicts the token there.
        cache, lengths: committed context, one buffer a layer.
        context: keys and values of further context (retained states, or a training sequence), of which context_mask is visible.
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
            if context:
                visible = jnp.broadcast_to(context_mask[:, None, :], (x.shape[0], slots.size, context_mask.shape[-1]))
                if shape.window is not None:
                    visible = visible & (context_positions[:, None, :] > positions[:, :, None] - shape.window)
                others = (DensePart(keys_values=context[index], mask=visible),)
            part = None if cache is None else CachePart(keys_values=cache[index], lengths=lengths)
            x, _ = layer(x, positions, inside, cache=part, others=others)
        return self.norm(x)


class Models(NamedTuple):
    """A target and, for speculative decoding, its drafter; a pytree that passes through `jit` as an argument."""

    target: Target
    drafter: Drafter | None
