"""Writes and gathers of the key/value cache against numpy slices."""

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cache import gather, init_cache, write
from reanchor_jax.config import LayerConfig, RopeConfig

ROPE = RopeConfig(theta=10000.0)
LAYERS = (LayerConfig(num_kv_heads=2, head_size=3, rope=ROPE), LayerConfig(num_kv_heads=1, head_size=5, rope=ROPE))
ROWS, SLOTS, ENTRIES = 4, 17, 6


def normal(rng, num_places):
    return tuple(rng.standard_normal((ROWS, 2 * layer.num_kv_heads, num_places, layer.head_size)).astype(np.float32) for layer in LAYERS)


def test_every_layer_has_a_zero_buffer_of_its_own_shape():
    cache = init_cache(LAYERS, num_rows=ROWS, num_slots=SLOTS, dtype=jnp.bfloat16)
    assert [(buffer.shape, buffer.dtype) for buffer in cache] == [((4, 4, 17, 3), jnp.bfloat16), ((4, 2, 17, 5), jnp.bfloat16)]
    assert not any(buffer.any() for buffer in cache)


def test_entries_land_at_each_rows_start_and_nothing_else_changes():
    write_jit = jax.jit(write)
    rng = np.random.default_rng(3)
    for starts in ([0, 1, 5, SLOTS - ENTRIES], [SLOTS - ENTRIES] * ROWS, [3, 0, 3, 9]):
        cache, entries = normal(rng, SLOTS), normal(rng, ENTRIES)
        written = write_jit(cache, entries, jnp.asarray(starts))
        for layer, buffer in enumerate(cache):
            expected = buffer.copy()
            for row, start in enumerate(starts):
                expected[row, :, start : start + ENTRIES] = entries[layer][row]
            np.testing.assert_array_equal(written[layer], expected)


def test_gather_takes_the_named_nodes_in_order_in_every_head():
    rng = np.random.default_rng(5)
    entries = normal(rng, ENTRIES)
    indices = rng.integers(ENTRIES, size=(ROWS, 9))
    gathered = jax.jit(gather)(entries, jnp.asarray(indices))
    for layer, found in enumerate(gathered):
        for row in range(ROWS):
            np.testing.assert_array_equal(found[row], entries[layer][row][:, indices[row]])
