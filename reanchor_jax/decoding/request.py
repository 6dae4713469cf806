"""Check a request on the host, before anything is traced, and pad it to shapes that seldom change.

In: prompts, lengths, budgets, stop ids as the caller gave them.
Out: budgets and padded stop ids as arrays; ValueError with the name, the rule, the value and what to do otherwise.
Source: `lax.dynamic_update_slice` and gathers clamp silently, so every bound must hold before they run.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from reanchor_jax.config import check_pair
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.sampling import Bans, Sampling, check_sampling
from reanchor_jax.decoding.state import DecodeState, num_slots, require_drafter, resolve_config, round_up
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target

_ID_SLOTS = 8  # stop ids and banned ones are padded to a multiple of this, so that another number of them seldom recompiles


def check_request(
    models: Models, prompts, prompt_lengths, config: DecodeConfig, sampling: Sampling | None, max_new_tokens: int, budgets
) -> Int[Array, " B"]:
    """Check everything that can be known on the host; return the rows' budgets, at most max_new_tokens.

    Raises ValueError. Of traced arrays only shapes are checked, and every row is then taken to be as long as the prompts' buffer.
    """
    for name, value, kind in (("models", models, Models), ("config", config, DecodeConfig), ("sampling", sampling, Sampling)):
        if not isinstance(value, kind) and not (name == "sampling" and value is None):
            raise ValueError(f"{name} must be a {kind.__name__}; got {type(value).__name__}.")
    if not isinstance(models.target, Target) or not isinstance(models.drafter, Drafter | None):
        raise ValueError(f"models must hold a Target and a Drafter or None; got {', '.join(type(model).__name__ for model in models)}.")
    target = models.target.config
    if config.is_speculative:
        drafter = require_drafter(models)
        check_pair(target, drafter.config)
        dtypes = models.target.norm.scale[...].dtype, drafter.norm.scale[...].dtype
        if dtypes[0] != dtypes[1]:
            raise ValueError(f"target ({dtypes[0]}) and drafter ({dtypes[1]}) must have one dtype; load both with the same dtype.")
        resolve_config(models, config)
    if config.cache_length > target.max_positions:
        raise ValueError(
            f"cache_length ({config.cache_length}) exceeds the {target.max_positions} positions the target was made for; lower it."
        )
    if not isinstance(max_new_tokens, (int, np.integer)) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number of at least 1; got {max_new_tokens!r}.")
    if np.ndim(prompts) != 2 or 0 in np.shape(prompts):
        raise ValueError(f"prompts must be [rows, tokens] with at least one of each; got shape {np.shape(prompts)}.")
    num_rows, prompt_size = np.shape(prompts)
    per_row = {"prompt_lengths": prompt_lengths, "budgets": budgets}
    if sampling is not None:
        per_row |= {f"sampling.{name}": value for name, value in sampling._asdict().items()}
    for name, value in per_row.items():
        if value is not None and np.shape(value) != (num_rows,):
            raise ValueError(f"{name} must hold one number per row ({num_rows}); got shape {np.shape(value)}.")
    for name, value in ({} if sampling is None else sampling._asdict()).items():
        check_sampling(name, value)
    given = np.full((num_rows,), max_new_tokens) if budgets is None else budgets if is_traced(budgets) else np.asarray(budgets)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(f"budgets must hold integers; got {given.dtype}.")
    if any(map(is_traced, (prompts, prompt_lengths, budgets))):
        _check_room(prompt_size, max_new_tokens, config)
        return jnp.minimum(jnp.asarray(given, jnp.int32), max_new_tokens)
    # numpy from here on: under a caller's jit, whatever jnp makes is traced and has no values to check
    tokens, lengths, new = np.asarray(prompts), np.asarray(prompt_lengths), np.minimum(given, max_new_tokens)
    if tokens.dtype.kind not in "iu" or lengths.dtype.kind not in "iu":
        raise ValueError(f"prompts and prompt_lengths must hold integers; got {tokens.dtype} and {lengths.dtype}.")
    if lengths.min() < 1 or lengths.max() > prompt_size:
        raise ValueError(f"prompt_lengths must lie in 1..{prompt_size}; got {lengths.tolist()}; a prompt needs at least one token.")
    if new.min() < 1:
        raise ValueError(f"budgets must be at least 1 token a row; got {new.tolist()}.")
    longest = int(np.argmax(lengths + new))
    _check_room(int(lengths[longest]), int(new[longest]), config)
    is_real = np.arange(prompt_size) < lengths[:, None]
    wrong = tokens[is_real & ((tokens < 0) | (tokens >= target.vocab_size))]
    if wrong.size:
        raise ValueError(f"prompts hold token id {wrong[0]}, outside the target's vocabulary 0..{target.vocab_size - 1}.")
    return jnp.asarray(new, jnp.int32)


def check_state(state: DecodeState, drafter: Drafter | None, config: DecodeConfig) -> None:
    """Raise ValueError if a state's arrays are not those of this resolved config. drafter: None where the config does not draft."""
    if (state.backlog.tokens.shape[1] > 0) != (config.schedule is not None):
        raise ValueError(
            "the state was prefilled with a schedule and this config has none, or the reverse; step with the config it was made for."
        )
    held, wanted = state.retained.tokens.shape[1], config.max_offsets
    if held != wanted:
        raise ValueError(
            f"the state holds {held} retained entries, this config {wanted} (max_offsets); step with the config it was prefilled with."
        )
    if len(state.drafter_cache) != (0 if drafter is None else drafter.config.num_layers):
        raise ValueError("the state was prefilled with another drafter, or without one; step with the config it was prefilled with.")
    slots = state.target_cache[0].shape[2]
    if slots != num_slots(drafter, config):
        raise ValueError(
            f"the state's cache has {slots} slots, this config {num_slots(drafter, config)}; step with the config it was prefilled with."
        )


def make_bans(suppressed_token_ids, min_new_tokens, num_rows: int, max_new_tokens: int, vocab_size: int) -> Bans | None:
    """What may not be drawn; None if nothing is asked for. Traced values are taken as they are, and a number per row always asks.

    Raises ValueError for an id outside the vocabulary, ids that leave nothing to draw, and a least number of tokens outside
    0..max_new_tokens.
    """
    is_given = is_traced(min_new_tokens)
    if not is_given:
        owed = np.asarray(min_new_tokens)
        if owed.dtype.kind not in "iu" or owed.shape not in ((), (num_rows,)):
            raise ValueError(f"min_new_tokens must be one whole number or one per row ({num_rows}); got {min_new_tokens!r}.")
        if owed.min() < 0 or owed.max() > max_new_tokens:
            raise ValueError(f"min_new_tokens must lie in 0..max_new_tokens ({max_new_tokens}); got {min_new_tokens}.")
        is_given = owed.ndim > 0 or bool(owed)
    if not is_traced(suppressed_token_ids):
        given = np.unique(np.asarray(suppressed_token_ids))
        if np.sum(given >= 0) >= vocab_size:
            raise ValueError("suppressed_token_ids holds the whole vocabulary; leave at least one token to draw.")
        is_given = is_given or given.size > 0
    if not is_given:
        return None
    return Bans(
        token_ids=pad_ids("suppressed_token_ids", suppressed_token_ids, vocab_size),
        num_owed=jnp.broadcast_to(jnp.asarray(min_new_tokens, jnp.int32), (num_rows,)),
    )


def pad_ids(name: str, token_ids, vocab_size: int) -> Int[Array, " Z"]:
    """Token ids as an array of a size that seldom changes; unused entries hold -1. Traced ids are taken as they are.

    Raises ValueError for an id outside the vocabulary.
    """
    if is_traced(token_ids):
        return token_ids.astype(jnp.int32)
    ids = np.asarray(token_ids).reshape(-1)
    if ids.size and ids.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers; got {ids.dtype}.")
    wrong = ids[(ids < -1) | (ids >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{name} holds {wrong[0]}, outside the target's vocabulary 0..{vocab_size - 1}.")
    padded = np.full((max(round_up(ids.size, _ID_SLOTS), _ID_SLOTS),), -1, np.int32)
    padded[: ids.size] = ids
    return jnp.asarray(padded)


def is_traced(x) -> bool:
    """Whether the value of x is unknown until the program runs."""
    return isinstance(x, Tracer)


def _check_room(prompt_size: int, num_new: int, config: DecodeConfig) -> None:
    if prompt_size + num_new > config.cache_length:
        raise ValueError(
            f"prompt ({prompt_size}) + max_new_tokens ({num_new}) exceed cache_length ({config.cache_length}); "
            f"raise cache_length to {prompt_size + num_new}."
        )
