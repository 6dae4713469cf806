"""The program of the tree-attention kernel on Hopper GPUs (Pallas, Mosaic GPU), as `mosaic` calls it.

In: queries folded into rows, a cache of whole blocks, dense entries with mask bits; a Launch.
Out: attention of each share of the keys, and the logarithm of its sum of weights.
Source: flash decoding; one warpgroup loads keys and values by TMA, the others multiply (wgmma).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from reanchor_jax.kernels.parts import MASKED

KEYS = 64  # of a block: two words of mask bits; and query rows of a warpgroup: the height of a wgmma
_PRODUCER_REGISTERS = 40
_ALL_REGISTERS = 65536  # of a thread block
_MOST_REGISTERS = 232
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage] - documented, but not in the list of exports
_IS_NEW = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)


class Tiles(NamedTuple):
    """How a head size is cut.

    num_stages: blocks of keys and of values in flight. num_warpgroups: those that multiply, 64 query rows each.
    num_columns: thread blocks that share the columns of the values, each with all scores of its own.
    """

    num_stages: int
    num_warpgroups: int
    num_columns: int


TILES = {64: Tiles(4, 2, 1), 128: Tiles(4, 2, 1), 256: Tiles(2, 2, 1), 512: Tiles(1, 1, 4)}


class Launch(NamedTuple):
    """What a kernel is compiled for. num_splits: shares of the keys. scale, cap: of the scores. interpret: as in `plgpu.kernel`."""

    tiles: Tiles
    num_splits: int
    window: int | None
    scale: float
    cap: float | None
    interpret: Any


@functools.partial(jax.jit, static_argnames="launch")  # so that all layers share one compilation
def launch_kernel(
    queries: Float[Array, "B G Q A"],
    cache: Float[Array, "B 2G S A"],
    dense: Float[Array, "B 2G N A"],
    words: Int[Array, "B W Q"],
    positions: Int[Array, "B Q"],
    bounds: Int[Array, "B 3"],
    *,
    launch: Launch,
) -> tuple[Float[Array, "B G P Q A"], Float[Array, "B G P Q"]]:
    """Attention of every share of the keys, normalised, and the base-2 logarithm of its sum of weights; about -1e30 if it saw nothing."""
    num_batch, num_groups, num_rows, size = queries.shape
    num_stages, num_warpgroups, num_columns = launch.tiles
    num_splits, dtype = launch.num_splits, queries.dtype
    columns = size // num_columns
    depth = size if size <= 256 else KEYS  # of one product; the descriptors of a deeper one do not fit the registers
    rows_in_tile = num_warpgroups * KEYS
    num_tiles = num_rows // rows_in_tile
    num_dense = dense.shape[2] // KEYS
    assert num_columns == 1 or num_warpgroups == 1  # a narrower output is put where another warpgroup would still read values
    # a block is launched with equal shares; warpgroups that together ask for more than those would wait for ever
    launched = _ALL_REGISTERS // (128 * (num_warpgroups + 1)) // 8 * 8 * (num_warpgroups + 1)
    registers = min(_MOST_REGISTERS, (launched - _PRODUCER_REGISTERS) // num_warpgroups // 8 * 8)
    is_staged = launch.interpret is not None  # the interpreter multiplies what lies in shared memory only

    def kernel(q_ref, cache_ref, dense_ref, words_ref, positions_ref, bounds_ref, out_ref, sum_ref, *scratch):
        q_sm, k_sm, v_sm, weights_sm, sum_sm, q_here, k_here, v_here, k_free, v_free = scratch
        split, column, place, warps = map(jax.lax.axis_index, ("split", "column", "place", "warps"))
        row, place = jax.lax.div(place, num_groups * num_tiles), jax.lax.rem(place, num_groups * num_tiles)
        group, tile = jax.lax.div(place, num_tiles), jax.lax.rem(place, num_tiles)
        mine = pl.ds(column * columns, columns)
        first, num_edge, num_cached = (bounds_ref[row, index] for index in range(3))
        num_blocks = num_cached + num_dense
        share = jax.lax.div(num_blocks + num_splits - 1, num_splits)
        start = jnp.minimum(split * share, num_blocks)
        stop = jnp.minimum(start + share, num_blocks)

        @pl.when(warps < num_warpgroups)
        def _multiply():
            plgpu.set_max_registers(registers, action="increase")
            here = pl.ds(tile * rows_in_tile + warps * KEYS, KEYS)
            by_row = plgpu.Layout.WGMMA.reduce(1)
            plgpu.barrier_wait(q_here.at[warps])

            def spread(x):
                return jax.lax.broadcast_in_dim(x, (KEYS, KEYS), [0])

            def visible(kind, index):
                key = plgpu.broadcasted_iota(jnp.int32, (KEYS, KEYS), 1, layout=plgpu.Layout.WGMMA)
                if kind == "edge":
                    assert launch.window is not None
                    oldest = _load(positions_ref.at[row, here], by_row) - (launch.window - 1)
                    return key + (first + index) * KEYS >= spread(oldest)
                low, high = (_load(words_ref.at[row, 2 * (index - num_cached) + half, here], by_row) for half in range(2))
                word = jnp.where(key < 32, spread(low), spread(high))
                return jax.lax.bitwise_and(jax.lax.shift_right_logical(word, jax.lax.bitwise_and(key, 31)), 1) == 1

            def step(index, carry, kind):
                mixed, largest, total = carry
                slot = jax.lax.rem(index - start, num_stages)
                plgpu.barrier_wait(k_here.at[slot])

                def score(accumulator):
                    for first_column in range(0, size, depth):
                        part = pl.ds(first_column, depth)
                        plgpu.wgmma(accumulator, q_sm.at[warps, :, part], k_sm.at[slot, :, part].T)
                    return accumulator[...]

                scores = pl.run_scoped(score, _ACC((KEYS, KEYS), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                # in base 2, whose exponential is an instruction
                if launch.cap is None:
                    scores = scores * (launch.scale * math.log2(math.e))
                else:
                    # tanh by an exponential: the instruction for it has only 11 bits
                    grown = jnp.exp2(scores * (2 * math.log2(math.e) * launch.scale / launch.cap))
                    scores = (1 - 2 / (1 + grown)) * (launch.cap * math.log2(math.e))
                is_visible = None if kind == "full" else visible(kind, index)
                if is_visible is not None:
                    scores = jnp.where(is_visible, scores, MASKED)
                new_largest = jnp.maximum(largest, scores.max(axis=1))
                decay = jnp.exp2(largest - new_largest)
                weights = jnp.exp2(scores - spread(new_largest))
                if is_visible is not None:
                    weights = jnp.where(is_visible, weights, 0.0)
                total = total * decay + weights.sum(axis=1)
                mixed = mixed * jax.lax.broadcast_in_dim(decay, mixed.shape, [0])
                narrow = weights.astype(dtype)
                plgpu.barrier_wait(v_here.at[slot])
                if is_staged:
                    weights_sm.at[warps][...] = narrow
                    plgpu.commit_smem()

                    def mix_apart(accumulator):
                        plgpu.wgmma(accumulator, weights_sm.at[warps], v_sm.at[slot])
                        return accumulator[...]

                    mixed = mixed + pl.run_scoped(mix_apart, _ACC((KEYS, columns), jnp.float32))
                else:

                    def mix(accumulator):
                        plgpu.wgmma(accumulator, narrow, v_sm.at[slot])

                    mixed = pl.run_state(mix)(_ACC.init(mixed))
                plgpu.barrier_arrive(v_free.at[slot])
                return mixed, new_largest, total

            carry = (
                plgpu.layout_cast(jnp.zeros((KEYS, columns), jnp.float32), plgpu.Layout.WGMMA),
                plgpu.layout_cast(jnp.full((KEYS,), MASKED, jnp.float32), by_row),
                plgpu.layout_cast(jnp.zeros((KEYS,), jnp.float32), by_row),
            )
            kinds = [] if launch.window is None else [("edge", 0, num_edge)]
            for kind, low, high in [*kinds, ("full", num_edge, num_cached), ("dense", num_cached, num_blocks)]:
                blocks = jnp.clip(low, start, stop), jnp.clip(high, start, stop)
                carry = jax.lax.fori_loop(*blocks, functools.partial(step, kind=kind), carry)
            mixed, largest, weight = carry
            weight = jnp.maximum(weight, 1e-30)
            mixed = mixed / jax.lax.broadcast_in_dim(weight, mixed.shape, [0])
            # in the place of this warpgroup's queries or, where it is narrower, of values that no other warpgroup reads
            done = q_sm.at[warps] if num_columns == 1 else v_sm.at[0]
            done[...] = mixed.astype(dtype)
            sum_sm.at[warps][...] = largest + jnp.log2(weight)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(done, out_ref.at[row, group, split, here, mine])

            @pl.when(column == 0)
            def _():
                plgpu.copy_smem_to_gmem(sum_sm.at[warps], sum_ref.at[row, group, split, here])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warps == num_warpgroups)
        def _fetch():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            for index in range(num_warpgroups):
                rows = pl.ds(tile * rows_in_tile + index * KEYS, KEYS)
                plgpu.copy_gmem_to_smem(q_ref.at[row, group, rows], q_sm.at[index], q_here.at[index])

            def fetch(index, _):
                slot = jax.lax.rem(index - start, num_stages)
                keys, values = (group, slice(None), k_sm, k_here, k_free), (num_groups + group, mine, v_sm, v_here, v_free)
                for entry, part, buffer, is_here, is_free in (keys, values):

                    @pl.when(index - start >= num_stages)
                    def _(is_free=is_free):
                        plgpu.barrier_wait(is_free.at[slot])

                    @pl.when(index < num_cached)
                    def _(entry=entry, part=part, buffer=buffer, is_here=is_here):
                        block = cache_ref.at[row, entry, pl.ds((first + index) * KEYS, KEYS), part]
                        plgpu.copy_gmem_to_smem(block, buffer.at[slot], is_here.at[slot])

                    @pl.when(index >= num_cached)
                    def _(entry=entry, part=part, buffer=buffer, is_here=is_here):
                        block = dense_ref.at[row, entry, pl.ds((index - num_cached) * KEYS, KEYS), part]
                        plgpu.copy_gmem_to_smem(block, buffer.at[slot], is_here.at[slot])

            def drain(index, _):  # every phase of a barrier has to be waited for
                slot = jax.lax.rem(index - start, num_stages)
                plgpu.barrier_wait(k_free.at[slot])
                plgpu.barrier_wait(v_free.at[slot])

            jax.lax.fori_loop(start, stop, fetch, None)
            jax.lax.fori_loop(jnp.maximum(stop - num_stages, start), stop, drain, None)

    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((num_batch, num_groups, num_splits, num_rows, size), dtype),
            jax.ShapeDtypeStruct((num_batch, num_groups, num_splits, num_rows), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((num_warpgroups, KEYS, size), dtype),
            plgpu.SMEM((num_stages, KEYS, size), dtype),
            plgpu.SMEM((num_stages, KEYS, columns), dtype),
            plgpu.SMEM((num_warpgroups, KEYS, KEYS), dtype) if is_staged else None,
            plgpu.SMEM((num_warpgroups, KEYS), jnp.float32),
            plgpu.Barrier(num_barriers=num_warpgroups),
            plgpu.Barrier(num_barriers=num_stages),
            plgpu.Barrier(num_barriers=num_stages),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_warpgroups),
            plgpu.Barrier(num_barriers=num_stages, num_arrivals=num_warpgroups),
        ],
        grid=(num_splits, num_columns, num_batch * num_groups * num_tiles),  # the last may be large, the others at most 65535
        grid_names=("split", "column", "place"),
        num_threads=num_warpgroups + 1,
        thread_name="warps",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if launch.interpret is None else {"interpret": launch.interpret}),
    )
    return run(queries, cache, dense, words, positions, bounds)


def _load(ref, layout):
    """Read a row of numbers from global memory into registers."""
    return plgpu.load(ref, *(() if _IS_NEW else ((),)), layout=layout, optimized=False)
