"""Attention of new tokens over a cache of actual length and over keys that are not in it (trie nodes, block slots).

In: queries [B T H A], one or more dense parts with masks, and a cache [B 2G S A] of which `lengths` slots are real.
Out: [B T H A]. Slot s of the cache is position s, so windows compare positions; slots at or past the length are never used.
Source: `mosaic` (a Pallas kernel for Hopper GPUs), `online` (plain XLA); here one of them is picked.
"""

import functools
import importlib
import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from reanchor_jax.kernels import online
from reanchor_jax.kernels.parts import CachePart, DensePart

Implementation = Literal["pallas", "xla"]


def attend(
    queries: Float[Array, "B T H A"],
    positions: Int[Array, "B T"],
    parts: tuple[DensePart, ...],
    *,
    cache: CachePart | None = None,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H A"]:
    """Softmax attention over all dense parts and the cache together, accumulated in float32.

    Every query must see at least one entry of a dense part (itself).
    window: a cache slot s is visible to position p iff s > p - window; None shows every committed slot.
    scale: factor of the scores; None means A^-0.5. cap: scores are squashed into (-cap, cap) by tanh; None leaves them.
    implementation: None takes the Pallas kernel where the program is compiled for a Hopper GPU and the kernel fits, else XLA. Raises
        ValueError if "pallas" is asked for and cannot run, and for an unknown name. With a cache the kernel has no derivative, and
        XLA one in forward mode only; without a cache both modes work.
    """
    if implementation not in (None, "pallas", "xla"):
        raise ValueError(f"implementation must be pallas, xla or None; got {implementation!r}.")
    if queries.size == 0:
        return queries
    scale = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    options = {"window": window, "scale": scale, "cap": cap}
    why_not = _why_not(queries, parts, cache)
    if implementation == "pallas":
        if why_not is None and jax.default_backend() != "gpu":
            why_not = f"it runs on a Hopper GPU, and the default backend is {jax.default_backend()}"
        if why_not is not None:
            raise ValueError(f"implementation='pallas' cannot run: {why_not}; leave implementation out, or take 'xla'.")
        return _mosaic().attend(queries, positions, parts, cache, **options)
    if implementation == "xla" or cache is None or why_not is not None:
        return online.attend(queries, positions, parts, cache, **options)
    # decided when the program is lowered, so that one for a GPU can be compiled where there is none
    return jax.lax.platform_dependent(
        queries, positions, parts, cache, cuda=partial(_mosaic().attend, **options), default=partial(online.attend, **options)
    )


def _why_not(queries: Float[Array, "B T H A"], parts: tuple[DensePart, ...], cache: CachePart | None) -> str | None:
    """Why the Pallas kernel does not fit these arrays or this machine's GPU; None if it does."""
    if cache is None:
        return "it needs a cache"
    dtypes = {queries.dtype, cache.keys_values.dtype, *(part.keys_values.dtype for part in parts)}
    if len(dtypes) > 1 or queries.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, the same everywhere; got {', '.join(sorted(map(str, dtypes)))}"
    mosaic = _mosaic()
    if mosaic is None:
        return "this installation of JAX lacks Pallas for NVIDIA GPUs"
    if queries.shape[-1] not in mosaic.TILES:
        return f"it takes head sizes {', '.join(map(str, mosaic.TILES))}; got {queries.shape[-1]}"
    if jax.default_backend() == "gpu":
        capabilities = {getattr(device, "compute_capability", None) for device in jax.devices()}
        if capabilities != {"9.0"}:
            return f"it is written for compute capability 9.0; the devices have {', '.join(sorted(map(str, capabilities)))}"
    return None


@functools.cache
def _mosaic() -> Any:
    """The kernel's room, imported when it is needed: it takes a quarter of a second, and not every platform has what it imports."""
    try:
        return importlib.import_module("reanchor_jax.kernels.mosaic")
    except (ImportError, AttributeError):
        return None
