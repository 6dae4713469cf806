"""Records of the loop: what the next round needs, and what a finished batch is.

In: -
Out: DecodeState, Generation; sizes of their arrays for a drafter and a config.
Source: ours.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Key

from reanchor_jax.cache import KVCache
from reanchor_jax.config import CACHE_CHUNK
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.retain import Retained
from reanchor_jax.decoding.sampling import Bans, Sampling
from reanchor_jax.decoding.schedule import Acceptance
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.statistics import StepInfo

FINISH_REASONS = ("running", "stop", "length")  # names of the codes in Generation.finish_reasons


class Backlog(NamedTuple):
    """What a schedule decoded plainly, kept until it drafts again: the drafter's context lacks it.

    tokens: by position, those from num_read to the length; the others may be anything. Without a schedule it has no room for any.
    num_read: committed positions that the drafter's cache holds; of rows that have ended it may say more.
    """

    tokens: Int[Array, "B positions"]
    num_read: Int[Array, " B"]


class DecodeState(NamedTuple):
    """What the next round needs of every row.

    lengths: committed tokens: those whose keys and values are in the caches.
    anchors: newest known token; its position is the length, and it is in no cache yet.
    remaining: tokens the row may still emit.
    finish: 0 running, 1 ended at a stop token, 2 at its budget.
    keys: row keys; a token's noise is folded from its row's key and its position.
    sampling: how the rows draw.
    stop_token_ids: ids that end a row; unused entries hold -1.
    bans: tokens that may not be drawn; None where nothing is banned.
    target_cache, drafter_cache: committed keys and values per layer; the drafter's is empty without one.
    retained: rejected states of the previous round.
    acceptance: drafts accepted of late, beside those that its arms promised; 0 without one.
    backlog: tokens the drafter has not read.
    """

    lengths: Int[Array, " B"]
    anchors: Int[Array, " B"]
    remaining: Int[Array, " B"]
    finish: Int[Array, " B"]
    keys: Key[Array, " B"]
    sampling: Sampling
    stop_token_ids: Int[Array, " Z"]
    target_cache: KVCache
    drafter_cache: KVCache
    retained: Retained
    acceptance: Acceptance
    backlog: Backlog
    bans: Bans | None = None


class Generation(NamedTuple):
    """A finished batch.

    tokens: emitted tokens, the prefill's first; past a row's length they hold 0.
    lengths: tokens emitted, stop token included.
    log_probs: nats, the target's own; processed_log_probs: nats, after temperature and filters (0 at temperature 0).
    finish_reasons: 1 stop, 2 length; names in FINISH_REASONS.
    info: StepInfo of every round, stacked, [max_new_tokens B]; rounds that did not happen hold 0.
    num_rounds: rounds the batch took.
    """

    tokens: Int[Array, "B max_new_tokens"]
    lengths: Int[Array, " B"]
    log_probs: Float[Array, "B max_new_tokens"]
    processed_log_probs: Float[Array, "B max_new_tokens"]
    finish_reasons: Int[Array, " B"]
    info: StepInfo
    num_rounds: Int[Array, ""]


def resolve_config(models: Models, config: DecodeConfig) -> DecodeConfig:
    """The config with what depends on the drafter's block size filled in. Raises ValueError as `require_drafter` and `resolve`."""
    if not config.is_speculative:
        return config
    drafter = require_drafter(models)
    if config.is_cut and drafter.config.confidence is None:
        raise ValueError("min_confidence and steps_per_second need a drafter with a confidence head (DSpark); this one has none.")
    return config.resolve(drafter.config.block_size)


def require_drafter(models: Models) -> Drafter:
    """The drafter. Raises ValueError if there is none."""
    if models.drafter is None:
        raise ValueError("this config drafts, but models.drafter is None; load a pair or use DecodeConfig.autoregressive().")
    return models.drafter


def num_places(drafter: Drafter | None, config: DecodeConfig) -> int:
    """P: nodes on the longest path of a trie, anchor included; a shifted block attached at the baseline's last slot."""
    if drafter is None or not config.is_speculative:
        return 1
    block_size = drafter.config.block_size
    return 2 * block_size - 1 if config.max_offsets else block_size


def num_slots(drafter: Drafter | None, config: DecodeConfig) -> int:
    """Cache slots: every position a row may hold, and room for the P entries the last round writes."""
    return round_up(
        max(config.cache_length + num_places(drafter, config), round_up(config.cache_length, config.prefill_chunk)), CACHE_CHUNK
    )


def round_up(x: int, multiple: int) -> int:
    """The least multiple that is x or more."""
    return -(-x // multiple) * multiple
