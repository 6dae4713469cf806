"""Key/value caches: one buffer [B 2G S A] a layer, keys in rows 0..G-1 and values in rows G..2G-1.

In: layer shapes, or keys and values of a pass.
Out: new buffers. Slot s holds position s; what lies at or past a row's length is garbage that no reader uses.
Source: layout measured to need no cache-sized copy inside a jitted loop (heads before positions, donated).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from reanchor_jax.config import LayerConfig

KVCache = tuple[Float[Array, "B 2G S A"], ...]


class Committed(NamedTuple):
    """Caches of all layers with the number of positions of each row that are real; passes only read it."""

    layers: KVCache
    lengths: Int[Array, " B"]


def init_cache(layers: tuple[LayerConfig, ...], *, num_rows: int, num_slots: int, dtype: jnp.dtype) -> KVCache:
    """Zero buffers for every layer."""
    return tuple(jnp.zeros((num_rows, 2 * layer.num_kv_heads, num_slots, layer.head_size), dtype) for layer in layers)


def write(cache: KVCache, keys_values: tuple[Float[Array, "B 2G T A"], ...], starts: Int[Array, " B"]) -> KVCache:
    """Write T entries of every layer at each row's start.

    start + T must not exceed S: `dynamic_update_slice` would clamp the start and overwrite committed entries.
    """

    def write_row(buffer, entries, start):
        return jax.lax.dynamic_update_slice(buffer, entries, (0, start, 0))

    # without it, entries that come out of a switch in another layout make XLA copy the whole buffer into theirs and back, every round
    row_major = Layout(major_to_minor=(0, 1, 2, 3))
    return tuple(
        jax.vmap(write_row)(buffer, with_layout_constraint(entries, row_major), starts)
        for buffer, entries in zip(cache, keys_values, strict=True)
    )


def gather(keys_values: tuple[Float[Array, "B 2G N A"], ...], indices: Int[Array, "B P"]) -> tuple[Float[Array, "B 2G P A"], ...]:
    """Entries of the nodes named by indices, in that order."""
    return tuple(jnp.take_along_axis(entries, indices[:, None, :, None], axis=2) for entries in keys_values)
