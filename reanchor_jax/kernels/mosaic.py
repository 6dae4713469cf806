"""Tree attention for Hopper GPUs: what stands around the kernel of `mosaic_kernel`.

In: as `tree_attention.attend`, in bfloat16 or float16, with a cache.
Out: [B T H A].
Source: flash decoding: the keys are split among thread blocks, which are joined by log-sum-exp; heads that share keys are rows of one tile.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.kernels.mosaic_kernel import KEYS, TILES, Launch, launch_kernel
from reanchor_jax.kernels.parts import CachePart, DensePart

_NUM_CORES = 132  # streaming multiprocessors of an H100 or H200
_MOST_SPLITS = 32


def attend(
    queries: Float[Array, "B T H A"],
    positions: Int[Array, "B T"],
    parts: tuple[DensePart, ...],
    cache: CachePart,
    *,
    window: int | None,
    scale: float,
    cap: float | None,
    interpret: Any = None,
) -> Float[Array, "B T H A"]:
    """Softmax attention over all dense parts and the cache together; under `vmap` over one cache, blocks become query rows of one call.

    interpret: parameters of Pallas' GPU interpreter, which runs the kernel on a CPU.
    """

    @jax.custom_batching.custom_vmap
    def run(queries, positions, parts, cache):
        return _attend(queries, positions, parts, cache, window=window, scale=scale, cap=cap, interpret=interpret)

    @run.def_vmap
    def fold(num_blocks, is_mapped, *given):
        def mapped(x, is_one):
            return x if is_one else jnp.broadcast_to(x[None], (num_blocks, *x.shape))

        if any(jax.tree.leaves(is_mapped[-1])):  # each has a cache of its own: more rows of the batch
            all_mapped = jax.tree.map(mapped, given, tuple(is_mapped))
            num_rows = given[0].shape[1] if is_mapped[0] else given[0].shape[0]
            widened = [
                DensePart(keys_values=part.keys_values, mask=jnp.broadcast_to(part.mask, (num_blocks, num_rows, *part.mask.shape[2:])))
                for part in all_mapped[2]
            ]
            merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (*all_mapped[:2], tuple(widened), all_mapped[3]))
            out = run(*merged)
            return out.reshape(num_blocks, num_rows, *out.shape[1:]), True
        queries, positions, parts, cache = given
        queries, positions = mapped(queries, is_mapped[0]), mapped(positions, is_mapped[1])
        folded = tuple(
            _fold_part(part._replace(mask=mapped(part.mask, one.mask)), num_blocks, is_own=one.keys_values)
            for part, one in zip(parts, is_mapped[2], strict=True)
        )
        out = run(_join(queries, 2), _join(positions, 2), folded, cache)
        split = out.reshape(out.shape[0], num_blocks, -1, *out.shape[2:])
        return jnp.moveaxis(split, 1, 0), True

    return run(queries, positions, parts, cache)


def _join(x: Array, axis: int) -> Array:
    """Move the mapped axis 0 in front of an axis of the mapped array and merge the two."""
    moved = jnp.moveaxis(x, 0, axis - 1)
    return moved.reshape(*moved.shape[: axis - 1], -1, *moved.shape[axis + 1 :])


def _fold_part(part: DensePart, num_blocks: int, *, is_own: bool) -> DensePart:
    """The entries of all blocks beside each other; a block sees its own where each has its own. The mask has an axis of blocks in front."""
    if not is_own:
        return DensePart(keys_values=part.keys_values, mask=_join(part.mask, 2))
    is_same = jnp.eye(num_blocks, dtype=bool)[:, None, None, :, None]
    mask = part.mask[:, :, :, None, :] & is_same
    mask = mask.reshape(*mask.shape[:3], -1)
    return DensePart(keys_values=_join(part.keys_values, 3), mask=_join(mask, 2))


def _attend(
    queries: Float[Array, "B T H A"],
    positions: Int[Array, "B T"],
    parts: tuple[DensePart, ...],
    cache: CachePart,
    *,
    window: int | None,
    scale: float,
    cap: float | None,
    interpret: Any,
) -> Float[Array, "B T H A"]:
    num_batch, count, heads, size = queries.shape
    num_groups = cache.keys_values.shape[1] // 2
    num_shared = heads // num_groups
    tiles = TILES[size]
    if count * num_shared <= KEYS:
        tiles = tiles._replace(num_warpgroups=1)
    rows_in_tile = tiles.num_warpgroups * KEYS
    missing = -(count * num_shared) % rows_in_tile

    def rows(x):
        """[B T ...] repeated for the heads that share keys, and padded to whole tiles."""
        return jnp.pad(jnp.repeat(x, num_shared, axis=1), [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], mode="edge")

    folded = queries.reshape(num_batch, count, num_groups, num_shared, size).transpose(0, 2, 1, 3, 4)
    folded = folded.reshape(num_batch, num_groups, -1, size)
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, missing), (0, 0)))
    dense = _dense_entries(positions, parts, cache, window=window)
    bounds = _bounds(positions, cache.lengths, window=window)
    num_tiles = folded.shape[2] // rows_in_tile * tiles.num_columns
    launch = Launch(
        tiles=tiles,
        num_splits=max(1, min(_MOST_SPLITS, _NUM_CORES // (num_batch * num_groups * num_tiles))),
        window=window,
        scale=scale,
        cap=cap,
        interpret=interpret,
    )
    mixed, sums = launch_kernel(
        folded, cache.keys_values, dense.keys_values, rows(_words(dense.mask)).swapaxes(1, 2), rows(positions), bounds, launch=launch
    )
    mixed = _joined(mixed, sums).astype(queries.dtype)[:, :, : count * num_shared]
    mixed = mixed.reshape(num_batch, num_groups, count, num_shared, size).transpose(0, 2, 1, 3, 4)
    return mixed.reshape(queries.shape)


def _joined(mixed: Float[Array, "B G P Q A"], sums: Float[Array, "B G P Q"]) -> Float[Array, "B G Q A"]:
    """The shares weighted by their sums, in float32. Written out share by share and for every column: so XLA makes one kernel of it."""
    sums = jnp.broadcast_to(sums[..., None], mixed.shape)
    shares = [(mixed[:, :, share].astype(jnp.float32), sums[:, :, share]) for share in range(sums.shape[2])]
    largest = functools.reduce(jnp.maximum, [exponent for _, exponent in shares])
    weights = [jnp.exp2(exponent - largest) for _, exponent in shares]
    joined = functools.reduce(jnp.add, [part * weight for (part, _), weight in zip(shares, weights, strict=True)])
    return joined / functools.reduce(jnp.add, weights)


def _dense_entries(positions: Int[Array, "B T"], parts: tuple[DensePart, ...], cache: CachePart, *, window: int | None) -> DensePart:
    """All dense parts beside each other, behind the cache's last block if that is not full, padded to whole blocks.

    So the kernel reads whole blocks of the cache only, and whatever stands past a length never meets a value.
    """
    keys_values, lengths = cache
    num_batch, double_groups, _, size = keys_values.shape
    starts = jnp.minimum(lengths // KEYS * KEYS, keys_values.shape[2] - KEYS)
    tail = jax.vmap(lambda entries, start: jax.lax.dynamic_slice(entries, (0, start, 0), (double_groups, KEYS, size)))(keys_values, starts)
    slots = starts[:, None] + jnp.arange(KEYS, dtype=jnp.int32)[None, :]
    is_real = (slots < lengths[:, None]) & (slots >= (lengths // KEYS * KEYS)[:, None])
    tail = jnp.where(is_real[:, None, :, None], tail, jnp.zeros((), tail.dtype))
    seen = jnp.broadcast_to(is_real[:, None, :], (*positions.shape, KEYS))
    if window is not None:
        seen = seen & (slots[:, None, :] > positions[:, :, None] - window)
    missing = -sum(part.mask.shape[2] for part in parts) % KEYS
    padding = jnp.zeros((num_batch, double_groups, missing, size), tail.dtype)
    masks = [jnp.broadcast_to(part.mask, (*positions.shape, part.mask.shape[2])) for part in parts]
    return DensePart(
        keys_values=jnp.concatenate([tail, *(part.keys_values for part in parts), padding], axis=2),
        mask=jnp.concatenate([seen, *masks, jnp.zeros((*positions.shape, missing), bool)], axis=2),
    )


def _words(mask: Bool[Array, "B T N"]) -> Int[Array, "B T W"]:
    """Masks as bits of 32-bit words, the first entry lowest."""
    bits = mask.reshape(*mask.shape[:2], -1, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
    return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=-1, dtype=jnp.uint32), jnp.int32)


def _bounds(positions: Int[Array, "B T"], lengths: Int[Array, " B"], *, window: int | None) -> Int[Array, "B 3"]:
    """Of the cache's full blocks: the first that any query sees; how many behind it some query does not see whole; and how many."""
    full = lengths // KEYS
    if window is None:
        zero = jnp.zeros_like(full)
        return jnp.stack([zero, zero, full], axis=1)
    first = jnp.minimum(jnp.maximum(jnp.min(positions, axis=1) - window + 1, 0) // KEYS, full)
    past = jnp.minimum((jnp.maximum(jnp.max(positions, axis=1) - window + 1, 0) + KEYS - 1) // KEYS, full)
    return jnp.stack([first, past - first, full - first], axis=1)
