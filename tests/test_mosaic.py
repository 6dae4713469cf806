"""The Pallas kernel for Hopper GPUs, interpreted on the CPU against a dense softmax, and lowered for CUDA in the shapes it is made for."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from tiny import random_models, tiny_drafter_config, tiny_llama_config

from reanchor_jax import DecodeConfig, generate, prefill, step
from reanchor_jax.kernels import mosaic
from reanchor_jax.kernels.parts import CachePart, DensePart
from reanchor_jax.kernels.tree_attention import attend

IS_NEW = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
interpreted = pytest.mark.skipif(not IS_NEW, reason="Pallas' GPU interpreter needs jax 0.11")
TOLERANCE = 0.02  # of bfloat16 weights and outputs of size 1; a key more or less moves outputs by far more


def drawn(seed, *, rows, count, heads, groups, size, slots, num_entries, lengths=None, spread=5):
    """Queries, positions, dense parts and a cache with NaN past every length; values are those of bfloat16."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    lengths = rng.integers(0, slots + 1, rows) if lengths is None else np.asarray(lengths)
    positions = lengths[:, None] + rng.integers(0, spread, (rows, count))
    parts = []
    for index, number in enumerate(num_entries):
        mask = rng.random((rows, count, number)) < 0.4
        if index == 0:
            mask |= np.eye(count, number, dtype=bool)
        parts.append(DensePart(keys_values=normal(rows, 2 * groups, number, size), mask=jnp.asarray(mask)))
    cache = np.array(normal(rows, 2 * groups, slots, size).astype(jnp.float32))
    for row, length in enumerate(lengths):
        cache[row, :, length:] = np.nan
    part = CachePart(keys_values=jnp.asarray(cache, jnp.bfloat16), lengths=jnp.asarray(lengths, jnp.int32))
    return normal(rows, count, heads, size), jnp.asarray(positions, jnp.int32), tuple(parts), part


def dense_attention(queries, positions, parts, cache, *, window, scale, cap):
    """Every query by itself, in float64, over what it sees."""
    queries, positions, lengths = (np.asarray(x, np.float64) for x in (queries, positions, cache.lengths))
    arrays = [(np.asarray(part.keys_values, np.float64), np.asarray(part.mask)) for part in parts]
    cached = np.asarray(cache.keys_values, np.float64)
    groups = cached.shape[1] // 2
    out = np.zeros(queries.shape)
    for row, query, head in np.ndindex(*queries.shape[:3]):
        group = head // (queries.shape[2] // groups)
        slots = np.arange(int(lengths[row]))
        slots = slots if window is None else slots[slots > positions[row, query] - window]
        seen = [(entries[row][:, mask[row, query]]) for entries, mask in arrays] + [cached[row][:, slots]]
        keys = np.concatenate([entries[group] for entries in seen])
        values = np.concatenate([entries[groups + group] for entries in seen])
        scores = scale * keys @ queries[row, query, head]
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        weights = np.exp(scores - scores.max())
        out[row, query, head] = weights @ values / weights.sum()
    return out


def as_on_a_gpu():
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 8, "gpu")))


def run(function, *given):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with as_on_a_gpu():
        return jax.jit(functools.partial(function, interpret=plgpu.InterpretGPUParams()))(*given)


def check(seed, *, window=None, cap=None, scale=0.2, **shape):
    given = drawn(seed, **shape)
    got = run(functools.partial(mosaic.attend, window=window, scale=scale, cap=cap), *given)
    assert got.dtype == jnp.bfloat16
    expected = dense_attention(*given, window=window, scale=scale, cap=cap)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=TOLERANCE)


@interpreted
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        # 40 entries of a part: their mask is two words
        (
            {"rows": 2, "count": 7, "heads": 4, "groups": 2, "size": 64, "slots": 128, "num_entries": (40,), "lengths": [0, 128]},
            {"cap": 0.5},
        ),
        pytest.param(
            {"rows": 1, "count": 5, "heads": 6, "groups": 2, "size": 128, "slots": 192, "num_entries": (5, 3), "lengths": [131]},
            {"window": 20},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"rows": 1, "count": 33, "heads": 4, "groups": 1, "size": 64, "slots": 128, "num_entries": (70,), "lengths": [65]},
            {"cap": 3.0},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"rows": 1, "count": 3, "heads": 2, "groups": 1, "size": 512, "slots": 64, "num_entries": (3,), "lengths": [63]},
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no and all slots, cap", "window", "two tiles, cap", "head size 512"],
)
def test_the_kernel_equals_a_dense_softmax_with_nan_in_every_slot_that_is_not_read(shape, options):
    check(3, **shape, **options)


def random_shape(seed):
    rng = np.random.default_rng(1000 + seed)
    groups = int(rng.choice([1, 2, 3]))
    count = int(rng.choice([1, 2, 5, 16, 17, 40]))
    shape = {
        "rows": int(rng.choice([1, 2, 3])),
        "count": count,
        "heads": groups * int(rng.choice([1, 2, 4, 5])),
        "groups": groups,
        "size": int(rng.choice([64, 64, 128, 256, 512])),
        "slots": int(rng.choice([64, 128, 192])),
        "num_entries": (count, *rng.choice([1, 15, 64, 70], size=rng.integers(0, 2)).tolist()),
    }
    options = {"window": [None, 1, 4, 64, 70, 1000][rng.integers(6)], "cap": [None, None, 2.0][rng.integers(3)]}
    return shape, options


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_the_kernel_equals_a_dense_softmax_in_random_shapes(seed):
    shape, options = random_shape(seed)
    check(seed, **shape, **options)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("is_shared", [True, False], ids=["one cache", "a cache each"])
def test_the_kernel_mapped_over_blocks_equals_the_twin_mapped_over_them(is_shared):
    """Blocks over one cache become query rows of one call; a cache each, rows of the batch."""
    num_blocks = 3
    drawn_blocks = [
        drawn(seed, rows=2, count=5, heads=4, groups=2, size=64, slots=128, num_entries=(5, 4), lengths=[70, 128])
        for seed in range(num_blocks)
    ]
    first = drawn_blocks[0]
    queries = jnp.stack([block[0] for block in drawn_blocks], axis=1)
    positions = jnp.stack([block[1] for block in drawn_blocks], axis=1)
    own = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *[block[2][0] for block in drawn_blocks])
    seen = jnp.stack([block[2][1].mask for block in drawn_blocks], axis=1)
    caches = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *[block[3] for block in drawn_blocks])
    axes = (1, 1, 1, None, 1, None if is_shared else 1)
    given = (queries, positions, own, first[2][1].keys_values, seen, first[3] if is_shared else caches)

    def one(queries, positions, own, retained, seen, cache, attend):
        return attend(queries, positions, (own, DensePart(keys_values=retained, mask=seen)), cache)

    def kernel(*given, interpret):
        inner = functools.partial(mosaic.attend, window=9, scale=0.2, cap=None, interpret=interpret)
        return jax.vmap(functools.partial(one, attend=inner), in_axes=axes, out_axes=1)(*given)

    def twin(*given):
        wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, given)
        inner = lambda queries, positions, parts, cache: attend(queries, positions, parts, cache=cache, window=9, scale=0.2)  # noqa: E731
        return jax.vmap(functools.partial(one, attend=inner), in_axes=axes, out_axes=1)(*wide)

    np.testing.assert_allclose(run(kernel, *given).astype(jnp.float32), jax.jit(twin)(*given), atol=TOLERANCE)


# (nodes or slots, heads, key heads, head size, window): Qwen3 4B and 8B, Llama-3.1-8B, Gemma-4-12B, SmolLM2, and their drafters' blocks
SHIPPED = [
    *((count, 32, 8, 128, None) for count in (1, 16, 64, 256)),
    (64, 16, 8, 256, 1024),
    (64, 16, 1, 512, None),
    (64, 9, 3, 64, None),
    (256, 32, 8, 128, 2048),
]


@pytest.mark.parametrize(("count", "heads", "groups", "size", "window"), SHIPPED)
def test_the_kernel_lowers_for_cuda_in_every_shipped_shape(count, heads, groups, size, window):
    """jax-ml/jax#28974, #32430, verl-project/verl#7131 (masks, CUDA 13, heads of 512)"""

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype)

    part = DensePart(keys_values=shape(jnp.bfloat16, 1, 2 * groups, count, size), mask=shape(jnp.bool_, 1, count, count))
    cache = CachePart(keys_values=shape(jnp.bfloat16, 1, 2 * groups, 4096, size), lengths=shape(jnp.int32, 1))
    given = shape(jnp.bfloat16, 1, count, heads, size), shape(jnp.int32, 1, count), (part,)
    traced = jax.jit(functools.partial(attend, window=window)).trace(*given, cache=cache)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_attention_in_float32_is_left_to_xla_on_a_gpu():
    """jax-ml/jax#12008: fused attention refuses float32"""
    part = DensePart(keys_values=jax.ShapeDtypeStruct((1, 4, 5, 64), jnp.float32), mask=jax.ShapeDtypeStruct((1, 5, 5), jnp.bool_))
    cache = CachePart(keys_values=jax.ShapeDtypeStruct((1, 4, 96, 64), jnp.float32), lengths=jax.ShapeDtypeStruct((1,), jnp.int32))
    given = jax.ShapeDtypeStruct((1, 5, 4, 64), jnp.float32), jax.ShapeDtypeStruct((1, 5), jnp.int32), (part,)
    text = jax.jit(attend).trace(*given, cache=cache).lower(lowering_platforms=("cuda",)).as_text()
    assert "dot_general" in text
    assert "custom_call" not in text


def test_what_cannot_run_is_refused():
    queries, positions, parts, cache = drawn(3, rows=1, count=3, heads=4, groups=2, size=64, slots=64, num_entries=(3,))
    for given, rule in (
        ({"implementation": "triton"}, "must be pallas, xla or None; got 'triton'"),
        ({"implementation": "pallas"}, "it needs a cache"),
        ({"implementation": "pallas", "cache": cache}, "runs on a Hopper GPU, and the default backend is cpu"),
    ):
        with pytest.raises(ValueError, match=rule):
            attend(queries, positions, parts, **given)
    with pytest.raises(ValueError, match="it takes bfloat16 or float16, the same everywhere; got bfloat16, float32"):
        attend(queries.astype(jnp.float32), positions, parts, cache=cache, implementation="pallas")
    with pytest.raises(ValueError, match="it takes head sizes 64, 128, 256, 512; got 32"):
        attend(queries[..., :32], positions, parts, cache=cache, implementation="pallas")


@pytest.mark.slow
def test_a_round_in_bfloat16_takes_the_kernel_on_a_gpu_and_the_twin_here():
    target = tiny_llama_config(num_hidden_layers=1, head_dim=64)
    drafter = tiny_drafter_config(
        target, block_size=3, num_hidden_layers=1, head_dim=64, layer_types=["full_attention"], target_layer_ids=[0]
    )
    models = random_models(target, drafter, seed=2, dtype=jnp.bfloat16)
    config = DecodeConfig.reanchor(cache_length=64, block_buckets=(), node_buckets=())
    given = np.asarray([[5, 9, 3], [7, 1, 0]], np.int32), np.asarray([3, 2], np.int32), jax.random.key(3)
    result = generate(models, *given, config=config, max_new_tokens=9)
    assert result.lengths.tolist() == [9, 9]
    state, _ = jax.eval_shape(functools.partial(prefill, config=config, max_new_tokens=9), models, *given)
    traced = jax.jit(functools.partial(step, config=config)).trace(models, state)
    # the target's layer, and the drafter's with all blocks in one call
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text
    assert len(re.findall("call @launch_kernel", text)) == 2
    assert "mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
