"""Block-diffusion drafters of the DFlash family: target states become keys and values of every layer; one pass drafts a whole block.

In: tapped target states [B T ED] (projected once into features), block tokens, a context cache it only reads.
Out: features [B T F]; context keys and values per layer; block states [B K D] and their logits.
Source: DFlash (arXiv 2602.06036): KV injection, `hidden_norm(fc(taps))`, the block is [anchor, mask x (K-1)]; DFlare (arXiv 2606.02091):
    a mixture of taps per layer; Domino, DSpark, xPress and DBLast: `heads`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.cache import Committed
from reanchor_jax.config import STYLES, DrafterConfig
from reanchor_jax.kernels.parts import CachePart, DensePart
from reanchor_jax.models.heads import ConfidenceHead, GRUHead, LatentMixture, MarkovHead, RefinerHead
from reanchor_jax.models.layers import DecoderLayer, RMSNorm, embed, linear, softcap
from reanchor_jax.models.target import Target


class BlockContext(NamedTuple):
    """Context of a block beside the cache: retained states, or the sequence in front of a training anchor.

    keys_values: per layer. positions: absolute. mask: entries the block sees.
    """

    keys_values: tuple[Float[Array, "B 2G N A"], ...]
    positions: Int[Array, "B N"]
    mask: Bool[Array, "B N"]


class TokenMap(nnx.Variable):
    """Token ids: integers that no optimiser and no cast may touch."""


class Drafter(nnx.Module):
    """Block drafter; embedding and head are its own or the target's, as its config says."""

    def __init__(self, config: DrafterConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        style, width, num_taps = STYLES[config.family], config.width, len(config.target_layer_ids)
        self.config = config
        is_mixed = config.fusion == "per_layer"
        self.fusion = None if is_mixed else linear(num_taps * width, width, dtype=dtype, rngs=rngs)
        if is_mixed:
            self.mixture = nnx.Param(jnp.zeros((config.num_layers, num_taps), dtype))
        shapes = [(2, layer.num_kv_heads, layer.head_size) for layer in config.layers]  # keys and values of the context (DFlare)
        self.contexts = nnx.List([linear(width, shape, dtype=dtype, rngs=rngs) for shape in shapes]) if is_mixed else None
        self.context_norm = RMSNorm(width, epsilon=config.norm_epsilon, dtype=dtype, is_wide=style.is_norm_wide)
        self.layers = nnx.List(
            [
                DecoderLayer(
                    layer,
                    width=config.width,
                    num_heads=config.num_heads,
                    mlp_width=config.mlp_width,
                    is_split=True,
                    style=style,
                    epsilon=config.norm_epsilon,
                    dtype=dtype,
                    rngs=rngs,
                )
                for layer in config.layers
            ]
        )
        self.norm = RMSNorm(width, epsilon=config.norm_epsilon, dtype=dtype, is_wide=style.is_norm_wide)
        num_outputs = config.draft_vocab_size or config.vocab_size
        self.embedding = nnx.Embed(config.vocab_size, width, dtype=dtype, param_dtype=dtype, rngs=rngs) if config.has_embedding else None
        self.head = linear(width, num_outputs, dtype=dtype, rngs=rngs) if config.has_head else None
        self.vocabulary = None if config.draft_vocab_size is None else TokenMap(jnp.arange(num_outputs, dtype=jnp.int32))
        self.causal_head = _causal_head(config, num_outputs, dtype=dtype, rngs=rngs)
        rank = 0 if config.head is None else config.head.size
        self.confidence = (
            None if config.confidence is None else ConfidenceHead(config.confidence, width=width, rank=rank, dtype=dtype, rngs=rngs)
        )
        self.latent_mixture = None if config.mixture is None else LatentMixture(config.mixture, width=width, dtype=dtype, rngs=rngs)

    def features(self, taps: Float[Array, "B T ED"]) -> Float[Array, "B T F"]:
        """Project tapped target states to context features: one vector for all layers, or one for each beside each other."""
        if self.fusion is not None:
            return self.context_norm(self.fusion(taps))
        weights = jax.nn.softmax(self.mixture[...].astype(jnp.float32), axis=-1).astype(taps.dtype)
        each = taps.reshape(*taps.shape[:2], weights.shape[1], self.config.width)
        mixed = jnp.einsum("BTED,LE->BTLD", each, weights, preferred_element_type=jnp.float32).astype(taps.dtype)
        return self.context_norm(mixed).reshape(*taps.shape[:2], self.config.feature_width)

    def context_keys_values(self, features: Float[Array, "B T F"], positions: Int[Array, "B T"]) -> tuple[Float[Array, "B 2G T A"], ...]:
        """Keys and values of context features at their own positions, one array a layer. Features skip the layers' input norm."""
        if self.contexts is None:
            return tuple(layer.attention.keys_values(features, positions) for layer in self.layers)
        each = features.reshape(*features.shape[:2], self.config.num_layers, self.config.width)
        return tuple(
            layer.attention.join(own(each[:, :, index]), positions)
            for index, (layer, own) in enumerate(zip(self.layers, self.contexts, strict=True))
        )

    def embed(self, target: Target, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Embedded block tokens, from the drafter's own table or the target's, scaled as the config says."""
        if self.embedding is None:
            return target.embed(tokens, scale=self.config.embedding_scale)
        scale = target.config.embedding_scale if self.config.embedding_scale is None else self.config.embedding_scale
        return embed(self.embedding, tokens, scale)

    def predicting(self, states: Float[Array, "*batch K D"]) -> Float[Array, "*batch K1 D"]:
        """States of the slots that predict the drafted tokens, in their order."""
        first = 0 if self.config.is_shifted else 1
        return jax.lax.slice_in_dim(states, first, first + self.config.num_drafts, axis=-2)

    def base_logits(self, target: Target, states: Float[Array, "*batch D"]) -> Float[Array, "*batch V1"]:
        """Logits before any correction, over the drafter's vocabulary."""
        logits = target.project(states) if self.head is None else self.head(states)
        if self.config.output_multiplier != 1.0:
            logits = logits * jnp.asarray(self.config.output_multiplier, logits.dtype)
        cap = target.config.softcap if self.config.softcap is None else self.config.softcap or None
        return softcap(logits, cap)

    def spread(self, logits: Float[Array, "*batch V1"]) -> Float[Array, "*batch V"]:
        """Logits over the target's vocabulary; tokens the drafter does not know get -inf."""
        if self.vocabulary is None:
            return logits
        full = jnp.full((*logits.shape[:-1], self.config.vocab_size), -jnp.inf, logits.dtype)
        return full.at[..., self.vocabulary[...]].set(logits)

    def block_states(
        self,
        embeddings: Float[Array, "B K D"],
        positions: Int[Array, "B K"],
        *,
        committed: Committed | None = None,
        context: BlockContext | None = None,
    ) -> Float[Array, "B K D"]:
        """Run one block over the committed context and, optionally, further context entries.

        embeddings: of [anchor, mask, ...]; slot k stands at positions[:, k].
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


def _causal_head(config: DrafterConfig, num_outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> GRUHead | MarkovHead | RefinerHead | None:
    if config.head is None:
        return None
    if config.head.kind == "gru":
        return GRUHead(config.head, width=config.width, vocab_size=num_outputs, dtype=dtype, rngs=rngs)
    sizes = {"width": config.width, "vocab_size": config.vocab_size, "num_outputs": num_outputs}
    if config.head.kind == "refiner":
        return RefinerHead(config.head, **sizes, num_drafts=config.num_drafts, epsilon=config.norm_epsilon, dtype=dtype, rngs=rngs)
    return MarkovHead(config.head, **sizes, dtype=dtype, rngs=rngs)
