"""Attach shifted blocks to the baseline block where their anchor token stands in it.

In: block tokens, baseline first.
Out: the site of each block, and the candidate path each one makes.
Source: ReAnchor Algorithm 1 (lines 10-17) and Table 6. T is {t : g(0)_t = g(d)_0}, t = 0 (the anchor itself) included; t* is its minimum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.decoding.config import AttachRule, Extent

_ATTACH_STREAM = 0x41545443  # keeps these draws apart from tokens and drafts


class Paths(NamedTuple):
    """Candidate continuations, each from the anchor (token 0) on; the baseline is path 0.

    tokens: padding holds 0. lengths: tokens of each path, anchor included; 0 means there is no such path.
    """

    tokens: Int[Array, "B M P"]
    lengths: Int[Array, "B M"]


class Match(NamedTuple):
    """What a rule may look at beside the baseline; each rule reads what it needs.

    anchors: first token of each block. is_block: False for padding.
    offsets: distance of each block from the anchor. continuations: likeliest tokens behind each block's anchor.
    seconds: the baseline's second choice behind each index, so that entry t stands at index t + 1. scores: random numbers.
    """

    anchors: Int[Array, "B M"]
    is_block: Bool[Array, "B M"]
    offsets: Int[Array, "B M"]
    continuations: Int[Array, "B M K1"]
    seconds: Int[Array, "B K1"]
    scores: Float[Array, "B M K"]


@jax.named_scope("attach")
def find_sites(baseline: Int[Array, "B K"], match: Match, *, rule: AttachRule, is_second_tried: bool = False) -> Int[Array, "B M"]:
    """Index of the baseline where each block attaches; -1 where it does not or the block is padding.

    earliest, longest_prefix, random: among the indices that hold the block's anchor token, the first, the first of those whose continuation
    agrees longest with the baseline's, or the one of the largest score. original_offset: the block's own offset, within the baseline;
    original_offset_match: that only where the token matches.
    is_second_tried: blocks without a site take the first index where their anchor token was the baseline's second choice.
    Block 0 is the baseline and always stands at 0.
    """
    is_match = (baseline[:, None, :] == match.anchors[:, :, None]) & match.is_block[:, :, None]
    places = jnp.arange(baseline.shape[1], dtype=jnp.int32)[None, None, :]
    if rule == "original_offset":
        is_match = (places == match.offsets[..., None]) & match.is_block[:, :, None]
    elif rule == "original_offset_match":
        is_match = is_match & (places == match.offsets[..., None])
    elif rule == "longest_prefix":
        agreement = _agreement(baseline, match.continuations)
        is_match = is_match & (agreement == jnp.max(jnp.where(is_match, agreement, -1), axis=-1, keepdims=True))
    elif rule == "random":
        is_match = is_match & (match.scores == jnp.max(jnp.where(is_match, match.scores, -jnp.inf), axis=-1, keepdims=True))
    site = _first(is_match)
    if is_second_tried:
        is_second = (match.seconds[:, None, :] == match.anchors[:, :, None]) & match.is_block[:, :, None]
        second = _first(is_second)
        site = jnp.where((site < 0) & (second >= 0), second + 1, site)
    return site.at[:, 0].set(0)


@jax.named_scope("attach")
def make_paths(blocks: Int[Array, "B M K"], sites: Int[Array, "B M"], kept: Int[Array, "B M"], *, extent: Extent = "both") -> Paths:
    """Path of block d attached at t: the first t baseline tokens, then the block; t + K tokens of at most 2K - 1.

    kept: tokens of each block that count, anchor included; 0 means the block is left out.
    extent: `in_block` cuts paths at the baseline's end, `extension` puts the baseline in their place up to there.
    """
    num_slots = blocks.shape[-1]
    places = jnp.arange(2 * num_slots - 1, dtype=jnp.int32)[None, None, :]
    is_attached = (sites >= 0) & (kept > 0)
    start = jnp.where(is_attached, sites, 0)[..., None]
    inside = jnp.clip(places - start, 0, num_slots - 1)
    prefix = blocks[:, :1, jnp.minimum(places[0, 0], num_slots - 1)]
    end_of_prefix = jnp.full_like(start, num_slots) if extent == "extension" else start
    tokens = jnp.where(places < end_of_prefix, prefix, jnp.take_along_axis(blocks, inside, axis=-1))
    lengths = jnp.where(is_attached, sites + kept, 0)
    if extent == "in_block":
        lengths = jnp.minimum(lengths, num_slots)
    elif extent == "extension":
        is_kept = (lengths > num_slots) & (kept[:, :1] == num_slots)  # there is no end to extend of a baseline that was cut
        lengths = jnp.where(is_kept | (jnp.arange(lengths.shape[1]) == 0)[None], lengths, 0)
    return Paths(tokens=jnp.where(places < lengths[..., None], tokens, 0), lengths=lengths)


def random_scores(keys: jax.Array, lengths: Int[Array, " B"], *, num_blocks: int, block_size: int) -> Float[Array, "B M K"]:
    """Scores of the rule `random`, one a block and index, from each row's key and length alone."""

    def draw(key, length):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, _ATTACH_STREAM), length), (num_blocks, block_size))

    return jax.vmap(draw)(keys, lengths)


def _agreement(baseline: Int[Array, "B K"], continuations: Int[Array, "B M K1"]) -> Int[Array, "B M K"]:
    """How many of a block's tokens behind its anchor equal the baseline's behind each index."""
    block_size = baseline.shape[1]
    places = jnp.arange(block_size, dtype=jnp.int32)[:, None] + 1 + jnp.arange(block_size - 1, dtype=jnp.int32)[None, :]
    behind = jnp.where(places < block_size, baseline[:, jnp.minimum(places, block_size - 1)], -1)
    return jnp.sum(jnp.cumprod(behind[:, None] == continuations[:, :, None, :], axis=-1, dtype=jnp.int32), axis=-1, dtype=jnp.int32)


def _first(is_match: Bool[Array, "B M K"]) -> Int[Array, "B M"]:
    return jnp.where(jnp.any(is_match, axis=-1), jnp.argmax(is_match, axis=-1), -1).astype(jnp.int32)
