"""The kernel's plain twin in XLA, for every device and dtype; differentiable where there is no cache.

In: as `tree_attention.attend`.
Out: [B T H A].
Source: online softmax (Milakov & Gimelshein 2018), chunk by chunk; work follows the actual length, not the capacity S.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reanchor_jax.config import CACHE_CHUNK
from reanchor_jax.kernels.parts import MASKED, CachePart, DensePart


class _Softmax(NamedTuple):
    """Running softmax: the largest score so far, the sum of exp(score - largest), and that sum weighted by values (float32)."""

    largest: Float[Array, "B G R T"]
    total: Float[Array, "B G R T"]
    mixed: Float[Array, "B G R T A"]


def attend(
    queries: Float[Array, "B T H A"],
    positions: Int[Array, "B T"],
    parts: tuple[DensePart, ...],
    cache: CachePart | None,
    *,
    window: int | None,
    scale: float,
    cap: float | None,
) -> Float[Array, "B T H A"]:
    """Softmax attention over all dense parts and the cache together, accumulated in float32."""
    num_kv_heads = parts[0].keys_values.shape[1] // 2
    rows, count, heads, size = queries.shape
    grouped = queries.reshape(rows, count, num_kv_heads, heads // num_kv_heads, size) * jnp.asarray(scale, queries.dtype)
    shape = (rows, num_kv_heads, heads // num_kv_heads, count)
    running = _Softmax(
        largest=jnp.full(shape, MASKED, jnp.float32),
        total=jnp.zeros(shape, jnp.float32),
        mixed=jnp.zeros((*shape, size), jnp.float32),
    )
    for part in parts:
        running = _absorb(running, grouped, part, cap)
    if cache is not None:
        running = _absorb_cache(running, grouped, positions, cache, window=window, cap=cap)
    mixed = running.mixed / running.total[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(queries.shape).astype(queries.dtype)


def _absorb_cache(
    running: _Softmax,
    grouped: Float[Array, "B T G R A"],
    positions: Int[Array, "B T"],
    cache: CachePart,
    *,
    window: int | None,
    cap: float | None,
) -> _Softmax:
    keys_values, lengths = cache
    rows, double_heads, _, size = keys_values.shape
    # bounds come from lengths alone: under vmap over blocks they stay unbatched, and so does the loop's condition
    end = jnp.max(lengths)
    start = jnp.int32(0) if window is None else jnp.maximum(jnp.min(lengths) - window + 1, 0) // CACHE_CHUNK

    def absorb_chunk(carry):
        index, running = carry
        first = index * CACHE_CHUNK
        chunk = jax.lax.dynamic_slice(keys_values, (0, 0, first, 0), (rows, double_heads, CACHE_CHUNK, size))
        slots = first + jnp.arange(CACHE_CHUNK, dtype=jnp.int32)
        is_real = slots[None, :] < lengths[:, None]
        # a slot past the length may hold anything, and 0 * NaN is NaN
        chunk = jnp.where(is_real[:, None, :, None], chunk, jnp.zeros((), chunk.dtype))
        visible = is_real[:, None, :]
        if window is not None:
            visible = visible & (slots[None, None, :] > positions[:, :, None] - window)
        return index + 1, _absorb(running, grouped, DensePart(keys_values=chunk, mask=visible), cap)

    return jax.lax.while_loop(lambda carry: carry[0] * CACHE_CHUNK < end, absorb_chunk, (start, running))[1]


def _absorb(running: _Softmax, grouped: Float[Array, "B T G R A"], part: DensePart, cap: float | None) -> _Softmax:
    keys, values = jnp.split(part.keys_values, 2, axis=1)
    scores = jnp.einsum("BTGRA,BGNA->BGRTN", grouped, keys, preferred_element_type=jnp.float32)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    mask = part.mask[:, None, None]
    scores = jnp.where(mask, scores, MASKED)
    largest = jnp.maximum(running.largest, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - largest[..., None]), 0.0)
    decay = jnp.exp(running.largest - largest)
    mixed = jnp.einsum("BGRTN,BGNA->BGRTA", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return _Softmax(
        largest=largest,
        total=running.total * decay + jnp.sum(weights, axis=-1),
        mixed=running.mixed * decay[..., None] + mixed,
    )
