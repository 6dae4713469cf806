"""Parts shared by target and drafter: RMSNorm, rotary embedding, gated MLP, grouped attention, one decoder layer.

In: activations [B T D] and positions [B T].
Out: activations [B T D]; keys and values of a call as one array [B 2G T A], keys in the first G rows.
Source: transformers' Llama and Qwen3 blocks (RMSNorm casts before the weight; rotary rotates halves, after the q/k norm).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.config import LayerConfig, RopeConfig
from reanchor_jax.kernels.tree_attention import CachePart, DensePart, attend


class RMSNorm(nnx.Module):
    """Scale by the root mean square over the last axis, in float32; cast back, then multiply by the weight."""

    def __init__(self, size: int, *, epsilon: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * jnp.expand_dims(self.scale[...], range(x.ndim - 1))


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, mlp_width: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.gate = linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.up = linear(width, mlp_width, dtype=dtype, rngs=rngs)
        self.down = linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class GroupedAttention(nnx.Module):
    """Projections of grouped-query attention, with optional RMSNorm of queries and keys per head."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        has_qk_norm: bool,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        size = config.head_size
        self.config = config
        self.query = linear(width, num_heads * size, dtype=dtype, rngs=rngs)
        self.key = linear(width, config.num_kv_heads * size, dtype=dtype, rngs=rngs)
        self.value = linear(width, config.num_kv_heads * size, dtype=dtype, rngs=rngs)
        self.output = linear(num_heads * size, width, dtype=dtype, rngs=rngs)
        self.query_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype) if has_qk_norm else None
        self.key_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype) if has_qk_norm else None

    def queries(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B T H A"]:
        """Project, normalise and rotate queries."""
        q = self._heads(self.query(x))
        return apply_rotary(q if self.query_norm is None else self.query_norm(q), positions, rope=self.config.rope)

    def keys_values(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B 2G T A"]:
        """Project keys (normalised, rotated) and values into one array: keys are rows 0..G-1, values G..2G-1."""
        k = self._heads(self.key(x))
        k = apply_rotary(k if self.key_norm is None else self.key_norm(k), positions, rope=self.config.rope)
        return jnp.concatenate([k, self._heads(self.value(x))], axis=2).swapaxes(1, 2)

    def _heads(self, x: Float[Array, "B T HA"]) -> Float[Array, "B T H A"]:
        return x.reshape(*x.shape[:2], x.shape[2] // self.config.head_size, self.config.head_size)  # T may be 0, so no -1


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        mlp_width: int,
        has_qk_norm: bool,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.attention = GroupedAttention(
            config, width=width, num_heads=num_heads, has_qk_norm=has_qk_norm, epsilon=epsilon, dtype=dtype, rngs=rngs
        )
        self.mlp_norm = RMSNorm(width, epsilon=epsilon, dtype=dtype)
        self.mlp = GatedMLP(width, mlp_width, dtype=dtype, rngs=rngs)

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
        )
        x = x + self.attention.output(mixed.reshape(*x.shape[:2], -1))
        return x + self.mlp(self.mlp_norm(x)), own


def linear(num_inputs: int, num_outputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear map without bias; kernel [inputs, outputs]."""
    return nnx.Linear(num_inputs, num_outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


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
    """
    base = rope.theta ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    if rope.kind == "default":
        return base
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
