"""Attach shifted blocks to the baseline block where their anchor token stands in it.

In: block tokens, baseline first.
Out: the site of each block, and the candidate path each one makes.
Source: ReAnchor Algorithm 1 (lines 10-17). T is {t : g(0)_t = g(d)_0}, t = 0 (the anchor itself) included; t* is its minimum.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Paths(NamedTuple):
    """Candidate continuations, each from the anchor (token 0) on; the baseline is path 0.

    tokens: padding holds 0. lengths: tokens of each path, anchor included; 0 means there is no such path.
    """

    tokens: Int[Array, "B M P"]
    lengths: Int[Array, "B M"]


def find_sites(baseline: Int[Array, "B K"], anchors: Int[Array, "B M"], is_block: Bool[Array, "B M"]) -> Int[Array, "B M"]:
    """Earliest index of the baseline that holds each block's anchor token; -1 where none does or the block is padding.

    Block 0 is the baseline and always stands at 0.
    """
    is_match = (baseline[:, None, :] == anchors[:, :, None]) & is_block[:, :, None]
    site = jnp.where(jnp.any(is_match, axis=-1), jnp.argmax(is_match, axis=-1), -1).astype(jnp.int32)
    return site.at[:, 0].set(0)


def make_paths(blocks: Int[Array, "B M K"], sites: Int[Array, "B M"], kept: Int[Array, "B M"]) -> Paths:
    """Path of block d attached at t: the first t baseline tokens, then the block; t + K tokens of at most 2K - 1.

    kept: tokens of each block that count, anchor included; 0 means the block is left out.
    """
    num_slots = blocks.shape[-1]
    places = jnp.arange(2 * num_slots - 1, dtype=jnp.int32)[None, None, :]
    is_attached = (sites >= 0) & (kept > 0)
    start = jnp.where(is_attached, sites, 0)[..., None]
    inside = jnp.clip(places - start, 0, num_slots - 1)
    prefix = blocks[:, :1, jnp.minimum(places[0, 0], num_slots - 1)]
    tokens = jnp.where(places < start, prefix, jnp.take_along_axis(blocks, inside, axis=-1))
    lengths = jnp.where(is_attached, sites + kept, 0)
    return Paths(tokens=jnp.where(places < lengths[..., None], tokens, 0), lengths=lengths)
