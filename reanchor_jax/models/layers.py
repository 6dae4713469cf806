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
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        return rescale(normalize(x, epsilon=self.epsilon), scale, x.dtype, is_wide=self.is_wide)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)), without biases; activation is silu or gelu_tanh.

    gate_up: both maps as one [D, 2, F], because one product over all its columns costs less than two, and F can be split over devices.
    """

    def __init__(self, width: int, mlp_width: int, *, activation: str, dtype: DTypeLike, rngs: nnx.Rngs):
        self.activation = activation
        self.gate_up = linear(width, (2, mlp_width), dtype=dtype, rngs=rngs)
        self.down = linear(mlp_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        both = self.gate_up(x)
        gate, up = both[..., 0, :], both[..., 1, :]
        gate = jax.nn.silu(gate) if self.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down(gate * up)


class GroupedAttention(nnx.Module):
    """Projections of grouped-query attention, with optional RMSNorm of queries, keys and values per head.

    query_key_value: all maps as one [D, G, R+2, A]: the R heads of a group, its keys and its values (query_key, R+1, where values are the
        keys before norm and rotary).
    query, key_value: instead of it, if is_split, [D, G, R, A] and [D, 2, G, A] (key, [D, 1, G, A]), for context that has no queries: a
        slice of a joint map would be copied in every pass.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        is_split: bool,
        style: StyleConfig,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        size, num_groups = config.head_size, config.num_kv_heads
        num_shared = num_heads // num_groups

        def maps(*outputs: int) -> nnx.LinearGeneral:
            return linear(width, (*outputs, size), dtype=dtype, rngs=rngs)

        self.config = config
        self.value_epsilon = epsilon if style.has_value_norm else None
        self.query_key_value = maps(num_groups, num_shared + 2) if config.has_value and not is_split else None
        self.query_key = maps(num_groups, num_shared + 1) if not config.has_value and not is_split else None
        self.query = maps(num_groups, num_shared) if is_split else None
        self.key_value = maps(2, num_groups) if config.has_value and is_split else None
        self.key = maps(1, num_groups) if not config.has_value and is_split else None
        self.output = linear(num_heads * size, width, dtype=dtype, rngs=rngs)
        self.query_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide) if style.has_qk_norm else None
        self.key_norm = RMSNorm(size, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide) if style.has_qk_norm else None

    def project(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T H A"], Float[Array, "B 2G T A"]]:
        """Queries, and keys and values in one array as of `keys_values`."""
        if self.query is not None:
            return self._turned(self._normed(self.query(x), self.query_norm), positions), self.keys_values(x, positions)
        found = self._either(self.query_key_value, self.query_key)(x)
        heads, values = found if self.query_key_value is None else found[..., :-1, :], found[..., -1, :]
        if self.query_norm is not None and self.key_norm is not None:
            # one sum of squares for queries and keys: on a GPU that is a kernel less
            scales = jnp.stack([*[self.query_norm.scale[...]] * (heads.shape[3] - 1), self.key_norm.scale[...]])
            wide = normalize(heads, epsilon=self.query_norm.epsilon)
            heads = rescale(wide, scales[None, None, None], heads.dtype, is_wide=self.query_norm.is_wide)
        keys = apply_rotary(heads[..., -1, :], positions, rope=self.config.rope)
        return self._turned(heads[..., :-1, :], positions), self._joined(keys, values)

    def keys_values(self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]) -> Float[Array, "B 2G T A"]:
        """Project keys (normalised, rotated) and values into one array: keys are rows 0..G-1, values G..2G-1. Only if is_split."""
        return self.join(self._either(self.key_value, self.key)(x), positions)

    def join(self, projected: Float[Array, "B T kinds G A"], positions: Int[Array, "B T"]) -> Float[Array, "B 2G T A"]:
        """Normalise and rotate projected keys, normalise projected values, and put them into one array."""
        keys = self._normed(projected[:, :, 0], self.key_norm)
        return self._joined(apply_rotary(keys, positions, rope=self.config.rope), projected[:, :, -1])

    def _joined(self, keys: Float[Array, "B T G A"], values: Float[Array, "B T G A"]) -> Float[Array, "B 2G T A"]:
        if self.value_epsilon is not None:
            values = normalize(values, epsilon=self.value_epsilon).astype(values.dtype)
        return jnp.concatenate([keys, values], axis=2).swapaxes(1, 2)

    @staticmethod
    def _either(one: nnx.LinearGeneral | None, other: nnx.LinearGeneral | None) -> nnx.LinearGeneral:
        found = one if other is None else other
        assert found is not None
        return found

    @staticmethod
    def _normed(x: Array, norm: RMSNorm | None) -> Array:
        return x if norm is None else norm(x)

    def _turned(self, queries: Float[Array, "B T G R A"], positions: Int[Array, "B T"]) -> Float[Array, "B T H A"]:
        """Rotate queries; the heads of a group stand beside each other."""
        num_heads = queries.shape[2] * queries.shape[3]  # T may be 0, so no -1
        return apply_rotary(queries.reshape(*queries.shape[:2], num_heads, queries.shape[4]), positions, rope=self.config.rope)


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); by style, outputs are normalised and the stream is scaled."""

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        num_heads: int,
        mlp_width: int,
        is_split: bool,
        style: StyleConfig,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        def norm():
            return RMSNorm(width, epsilon=epsilon, dtype=dtype, is_wide=style.is_norm_wide)

        self.style = style
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = GroupedAttention(
            config, width=width, num_heads=num_heads, is_split=is_split, style=style, epsilon=epsilon, dtype=dtype, rngs=rngs
        )
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
        queries, own = self.attention.project(normed, positions)
        mixed = attend(
            queries,
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


def linear(num_inputs: int, outputs: int | tuple[int, ...], *, dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.LinearGeneral:
    """A linear map without bias; kernel [inputs, *outputs]."""
    return nnx.LinearGeneral(num_inputs, outputs, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs)


def rescale(
    wide: Float[Array, "*batch D"], scale: Float[Array, "*#batch D"], dtype: DTypeLike, *, is_wide: bool
) -> Float[Array, "*batch D"]:
    """Multiply what `normalize` made by a norm's weight and cast it: after the product if is_wide, else before."""
    return (wide * scale.astype(jnp.float32)).astype(dtype) if is_wide else wide.astype(dtype) * scale


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
