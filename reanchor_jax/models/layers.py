"""Parts shared by target and drafter: RMSNorm, rotary embedding, gated MLP, grouped attention, one decoder layer.

In: activations [B T D] and positions [B T].
Out: activations [B T D]; keys and values of a call as one array [B 2G T A], keys in the first G rows.
Source: transformers' Llama, Qwen3 and Gemma-4 blocks (rotary rotates halves, after the q/k norm).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.config import LayerConfig, RopeConfig, StyleConfig
from reanchor_jax.kernels.parts import CachePart, DensePart
from reanchor_jax.kernels.tree_attention import attend


class RMSNorm(nnx.Module):
    """Scale by the root mean square over the last axis, in float32, then multiply by the weight.

    is_wide: multiply in float32 and then cast back (Gemma-4); otherwise the other way round (Llama, Qwen3).
    """

    def __init__(self, size: int, *, epsilon: float, dtype: DTypeLike, is_wide: bool = False):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.epsilon = epsilon
        self.is_wide = is_wide

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = normalize(x, epsilon=self.epsilon)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if self.is_wide:
            return (wide * scale.astype(jnp.float32)).astype(x.dtype)
        return wide.astype(x.dtype) * scale


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), without biases; activation is silu or gelu_tanh."""

    def __init__(self, width: int, mlp_width: int, *, activation: str, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = activation
        self.gate = linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.up = linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.down = linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = self.gate(x)
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * self.up(x))


class GroupedAttention(nnx.Module):
    """Projections of grouped-query attention, with optional RMSNorm of queries, keys and values per head."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        style: StyleConfig,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        size = config.head_size
        self.config = config
        self.value_epsilon = epsilon if style.has_value_norm else None
        self.query = linear(width, num_heads * size, dtype=dtype, rngs=rngs)
        self.key = linear(width, config.num_kv_heads * size, dtype=dtype, rngs=rngs)
        self.value = linear(width, config.num_kv_heads * size, dtype=dtype, rngs=rngs) if config.has_value else None
        self.output = linear(num_heads * size, width, dtype=dtype, rngs=rngs)
        self.query_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide) if style.has_qk_norm else None
        self.key_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide) if style.has_qk_norm else None

    def queries(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H A"]:
        """Project, normalise and rotate queries."""
        q = self._heads(self.query(x))
        return apply_rotary(q if self.query_norm is None else self.query_norm(q), positions, rope=self.config.rope)

    def keys_values(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B 2G T A"]:
        """Project keys (normalised, rotated) and values into one array: keys are rows 0..G-1, values G..2G-1."""
        raw = self.key(x)
        return self.join(raw, raw if self.value is None else self.value(x), positions)

    def join(self, keys: Float[Array, "B T GA"], values: Float[Array, "B T GA"], positions: Int[Array, "B T"]) -> Float[Array, "B 2G T A"]:
        """Normalise and rotate projected keys, normalise projected values, and put them into one array."""
        k, v = self._heads(keys), self._heads(values)
        k = apply_rotary(k if self.key_norm is None else self.key_norm(k), positions, rope=self.config.rope)
        if self.value_epsilon is not None:
            v = normalize(v, epsilon=self.value_epsilon).astype(v.dtype)
        return jnp.concatenate([k, v], axis=2).swapaxes(1, 2)

    def _heads(self, x: Float[Array, "B T HA"]) -> Float[Array, "B T H A"]:
        return x.reshape(*x.shape[:2], x.shape[2] // self.config.head_size, self.config.head_size)  # T may be 0, so no -1


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); by style, outputs are normalised and the stream is scaled."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        mlp_width: int,
        style: StyleConfig,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def norm():
            return RMSNorm(width, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide)

        self.style = style
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = GroupedAttention(config, width=width, num_heads=num_heads, style=style, epsilon=epsilon, dtype=dtype, rngs=rngs)
        self.mlp = GatedMLP(width, mlp_width, activation=style.activation, dtype=dtype, rngs=rngs)
        self.attention_output_norm = norm() if style.has_output_norms else None
        self.mlp_output_norm = norm() if style.has_output_norms else None
        self.scale = nnx.Param(jnp.ones((1,), dtype)) if style.has_layer_scale else None

    def __call__(
        self,
        x: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        *,
        cache: CachePart | None,
        others: tuple[DensePart, ...] = (),
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B 2G T A"]]:
        """Run the layer over T new tokens; return their states, and their keys and values.

        mask: which of the T tokens each token sees, window included.
        cache: committed keys and values, read only. others: further keys and values with masks of their own.
        """
        normed = self.attention_norm(x)
        own = self.attention.keys_values(normed, positions)
        mixed = attend(
            self.attention.queries(normed, positions),
            positions,
            (*others, DensePart(keys_values=own, mask=mask)),
            cache=cache,
            window=self.attention.config.window,
            scale=self.style.attention_scale,
        )
        mixed = self.attention.output(mixed.reshape(*x.shape[:2], -1))
        x = x + (mixed if self.attention_output_norm is None else self.attention_output_norm(mixed))
        mixed = self.mlp(self.mlp_norm(x))
        x = x + (mixed if self.mlp_output_norm is None else self.mlp_output_norm(mixed))
        return x if self.scale is None else x * self.scale[...][None, None], own


def linear(num_inputs: int, num_outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear map without bias; kernel [inputs, outputs]."""
    return nnx.Linear(num_inputs, num_outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def normalize(x: Float[Array, "*batch D"], *, epsilon: float) -> Float[Array, "*batch D"]:
    """Divide by the root mean square over the last axis; in float32, not cast back."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)


def embed(embedding: nnx.Embed, tokens: Int[Array, "*batch"], scale: float) -> Float[Array, "*batch D"]:
    """Embedded tokens times a scale, which is rounded to the dtype of the weights."""
    embedded = embedding(tokens)
    return embedded if scale == 1.0 else embedded * jnp.asarray(scale, embedded.dtype)


def softcap(logits: Float[Array, "*batch V"], cap: float | None) -> Float[Array, "*batch V"]:
    """Squash logits into (-cap, cap) by tanh; None leaves them."""
    if cap is None:
        return logits
    bound = jnp.asarray(cap, logits.dtype)
    return jnp.tanh(logits / bound) * bound


def apply_rotary(x: Float[Array, "B T H A"], positions: Int[Array, "B T"], *, rope: RopeConfig) -> Float[Array, "B T H A"]:
    """Rotate pairs (i, i + A/2) by position * frequency_i.

    In float32 whatever the dtype of x: bfloat16 rounds position 257 to 256.
    """
    frequencies = rotary_frequencies(rope, x.shape[-1])
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)


def rotary_frequencies(rope: RopeConfig, head_size: int) -> Float[Array, " half"]:
    """Radians per position of each rotated pair, after the config's rescaling.

    llama3: wavelengths beyond original/low are slowed by `factor`, those below original/high kept, between them mixed.
    yarn: pairs that turn more than beta_fast times within the original context are kept, fewer than beta_slow slowed, a ramp between.
    proportional: the first rotated_rate of the pairs turn as by default, the others not at all.
    """
    base = rope.theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    if rope.kind == "default":
        return base
    if rope.kind == "proportional":
        return jnp.where(jnp.arange(head_size // 2) < int(rope.rotated_rate * head_size // 2), base, 0.0)
    slowed = base / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_positions * base / (2 * math.pi)
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return keep * base + (1 - keep) * slowed

    def pair_index(num_turns: float) -> float:
        return head_size * math.log(rope.original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_index(rope.beta_fast), pair_index(rope.beta_slow)
    if rope.is_truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = jnp.clip((jnp.arange(head_size // 2, dtype=jnp.float32) - first) / max(last - first, 0.001), 0.0, 1.0)
    return (1 - ramp) * base + ramp * slowed
