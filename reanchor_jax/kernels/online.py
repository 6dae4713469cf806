"""The kernel's plain twin in XLA, for every device and dtype; with a cache that is longer than a chunk, derivatives in forward mode only.

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

# While a step has fewer scores than these, it costs more than what it computes, so it reads twice the slots; but slots past the length are
# read with the others, so no more than 128.
_FEW_SCORES = 16384
_LARGEST_CHUNK = 128


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
    grouped = grouped.transpose(0, 2, 3, 1, 4)  # here, because XLA would transpose the scores instead
    running = _softmax(grouped, parts, cap) if cache is None else _with_cache(grouped, positions, parts, cache, window=window, cap=cap)
    mixed = running.mixed / running.total[..., None]
    return mixed.transpose(0, 3, 1, 2, 4).reshape(queries.shape).astype(queries.dtype)


def _with_cache(
    grouped: Float[Array, "B G R T A"],
    positions: Int[Array, "B T"],
    parts: tuple[DensePart, ...],
    cache: CachePart,
    *,
    window: int | None,
    cap: float | None,
) -> _Softmax:
    """The first chunk together with the dense parts, further ones in a loop: most contexts on a CPU end in the first."""
    keys_values, lengths = cache
    rows, double_heads, num_slots, size = keys_values.shape
    _, num_groups, num_shared, count, _ = grouped.shape
    chunk_size = CACHE_CHUNK
    while chunk_size < _LARGEST_CHUNK and 2 * chunk_size * count * num_groups * num_shared <= _FEW_SCORES:
        chunk_size *= 2
    chunk_size = min(chunk_size, num_slots)
    # bounds come from lengths alone: under vmap over blocks they stay unbatched, and so does the loop's condition
    end = jnp.max(lengths)
    start = jnp.int32(0) if window is None else jnp.maximum(jnp.min(lengths) - window + 1, 0) // CACHE_CHUNK * CACHE_CHUNK

    def chunk_at(first):
        begin = jnp.minimum(first, num_slots - chunk_size)
        chunk = jax.lax.dynamic_slice(keys_values, (0, 0, begin, 0), (rows, double_heads, chunk_size, size))
        slots = begin + jnp.arange(chunk_size, dtype=jnp.int32)
        # slots before `first` were in the chunk before
        is_real = (slots[None, :] < lengths[:, None]) & (slots >= first)[None, :]
        # a slot past the length may hold anything, and 0 * NaN is NaN
        chunk = jnp.where(is_real[:, None, :, None], chunk, jnp.zeros((), chunk.dtype))
        visible = is_real[:, None, :]
        if window is not None:
            visible = visible & (slots[None, None, :] > positions[:, :, None] - window)
        return DensePart(keys_values=chunk, mask=visible)

    def absorb_chunk(carry):
        first, running = carry
        found = _softmax(grouped, (chunk_at(first),), cap, above=running.largest)
        decay = jnp.exp(running.largest - found.largest)
        running = _Softmax(
            largest=found.largest,
            total=running.total * decay + found.total,
            mixed=running.mixed * decay[..., None] + found.mixed,
        )
        return first + chunk_size, running

    running = _softmax(grouped, (*parts, chunk_at(start)), cap)
    if num_slots <= chunk_size:
        return running
    return jax.lax.while_loop(lambda carry: carry[0] < end, absorb_chunk, (start + chunk_size, running))[1]


def _softmax(
    grouped: Float[Array, "B G R T A"], parts: tuple[DensePart, ...], cap: float | None, *, above: Float[Array, "B G R T"] | None = None
) -> _Softmax:
    """Softmax over some parts, scores taken from the largest, which is at least `above`.

    Every query must see an entry, or `above` be the score of one: then what is masked weighs exp(MASKED - largest) = 0. Scores of the parts
    stand beside each other, but not their keys: under vmap over blocks, those of a cache are in one product for all blocks.
    """
    keys_values = [jnp.split(part.keys_values, 2, axis=1) for part in parts]
    scores = [jnp.einsum("BGRTA,BGNA->BGRTN", grouped, keys, preferred_element_type=jnp.float32) for keys, _ in keys_values]
    if cap is not None:
        scores = [cap * jnp.tanh(score / cap) for score in scores]
    masked = [jnp.where(part.mask[:, None, None], score, MASKED) for score, part in zip(scores, parts, strict=True)]
    together = masked[0] if len(masked) == 1 else jnp.concatenate(masked, axis=-1)
    largest = jnp.max(together, axis=-1)
    largest = largest if above is None else jnp.maximum(above, largest)
    weights = jnp.exp(together - largest[..., None])
    total, mixed, first = jnp.sum(weights, axis=-1), jnp.zeros((), jnp.float32), 0
    for _, values in keys_values:
        share = jax.lax.slice_in_dim(weights, first, first + values.shape[2], axis=-1).astype(values.dtype)
        mixed = mixed + jnp.einsum("BGRTN,BGNA->BGRTA", share, values, preferred_element_type=jnp.float32)
        first += values.shape[2]
    return _Softmax(largest=largest, total=total, mixed=mixed)
