"""Choose tokens: temperature, top-k, top-p, min-p as arrays, and noise that depends on (row, position) alone.

In: logits [B N V], per-row Sampling, Gumbel noise [B J V] of J positions.
Out: tokens with raw and processed log-probabilities.
Source: the Gumbel-max trick; filters follow the order of transformers' warpers (temperature, top-k, top-p, min-p).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Key

# folded in before the position, so a draft's own noise never meets the target's, nor a component's that of a token
_DRAFT_STREAM, _COMPONENT_STREAM = 0xFFFFFFFF, 0xFFFFFFFE


_LARGEST = {"temperature": 1e30, "top_k": 2**31 - 1}  # what float32 and int32 can hold
# what holds of each field, in words, and what to do
_RULES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str, str]] = {
    "temperature": (lambda x: x >= 0, "be 0 or more", "use 0 for greedy decoding"),
    "top_k": (lambda x: x >= 0, "be 0 or more", "use 0 to keep all tokens"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "lie in (0, 1]", "use 1 to keep all tokens"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "lie in [0, 1]", "use 0 to keep all tokens"),
}


class Sampling(NamedTuple):
    """How each row draws its tokens. All are arrays: a new value does not recompile.

    temperature: 0 takes the argmax.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p; 1 keeps all.
    min_p: keep tokens of at least min_p times the largest probability; 0 keeps all.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]


class Bans(NamedTuple):
    """Tokens that the target may not draw.

    token_ids: never; unused entries hold -1. num_owed: tokens a row must still emit before it may end; 0 or less: it may.
    """

    token_ids: Int[Array, " Y"]
    num_owed: Int[Array, " B"]


class Choice(NamedTuple):
    """Tokens chosen at N places.

    log_probs: nats, of the model's own distribution. processed_log_probs: nats, after temperature and filters; 0 at temperature 0.
    """

    tokens: Int[Array, "B N"]
    log_probs: Float[Array, "B N"]
    processed_log_probs: Float[Array, "B N"]


def make_sampling(
    num_rows: int, *, temperature: ArrayLike = 0.0, top_k: ArrayLike = 0, top_p: ArrayLike = 1.0, min_p: ArrayLike = 0.0
) -> Sampling:
    """Build a Sampling from numbers or per-row sequences.

    Raises ValueError as `check_sampling`, and for a value that is neither one number nor one per row.
    """
    values = {}
    for name, value in {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}.items():
        check_sampling(name, value)
        if np.shape(value) not in ((), (num_rows,)):
            raise ValueError(f"{name} must be one number or one per row ({num_rows}); got shape {np.shape(value)}.")
        values[name] = jnp.broadcast_to(jnp.asarray(value, jnp.int32 if name == "top_k" else jnp.float32), (num_rows,))
    return Sampling(**values)


def check_sampling(name: str, value: ArrayLike) -> None:
    """Raise ValueError unless a field of Sampling holds: temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1, all finite.

    Traced values are not checked.
    """
    if isinstance(value, Tracer):
        return
    given, is_top_k = np.asarray(value), name == "top_k"
    if given.dtype.kind not in ("iu" if is_top_k else "iuf"):
        raise ValueError(f"{name} must be {'an integer' if is_top_k else 'a number'}; got {value!r}.")
    holds, rule, advice = _RULES[name]
    if not (np.isfinite(given) & holds(given)).all():
        raise ValueError(f"{name} must {rule}; got {value}; {advice}.")
    if (given > _LARGEST.get(name, 1)).any():
        raise ValueError(f"{name} must be at most {_LARGEST[name]}; got {value}.")


def row_keys(key: Key[Array, ""] | Key[Array, " B"] | Array, num_rows: int) -> Key[Array, " B"]:
    """One key per row: folded by row index from one key, or the given ones. Raw uint32 keys are wrapped.

    Raises ValueError for any other number of keys, and for what is no key.
    """
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key must be a JAX key such as jax.random.key(0); got {type(key).__name__}.")
    is_raw = key.dtype == jnp.uint32 and key.shape[-1:] == jax.random.key_data(jax.random.key(0)).shape
    if not (is_raw or jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise ValueError(f"key must be a JAX key such as jax.random.key(0); got {key.dtype} of shape {key.shape}.")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    if key.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_rows, dtype=jnp.uint32))
    if key.shape != (num_rows,):
        raise ValueError(f"key must be one key or one per row ({num_rows}); got shape {key.shape}.")
    return key


def position_noise(keys: Key[Array, " B"], positions: Int[Array, "B J"], *, vocab_size: int) -> Float[Array, "B J V"]:
    """Gumbel noise with which the token of each position is drawn: `jax.random.gumbel(fold_in(row_key, position), (V,))`."""

    def draw(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,), jnp.float32)

    return jax.vmap(jax.vmap(draw, (None, 0)))(keys, positions)


def draft_noise(keys: Key[Array, " B"], positions: Int[Array, "B M K"], *, first_block: int, vocab_size: int) -> Float[Array, "B M K V"]:
    """Gumbel noise of a draft's own, independent of the target's and of other blocks'. first_block: number of the first block given."""
    return _block_noise(keys, positions, stream=_DRAFT_STREAM, first_block=first_block, size=vocab_size)


def component_noise(keys: Key[Array, " B"], positions: Int[Array, "B M"], *, num_components: int) -> Float[Array, "B M Z"]:
    """Gumbel noise with which every block's component is drawn, independent of that of all tokens. positions: of the blocks' anchors."""
    return _block_noise(keys, positions[..., None], stream=_COMPONENT_STREAM, first_block=0, size=num_components)[:, :, 0]


def filter_logits(logits: Float[Array, "B N V"], sampling: Sampling) -> Float[Array, "B N V"]:
    """Divide by the temperature and set what top-k, top-p and min-p remove to -inf, in float32. Rows at temperature 0 are not scaled."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits.astype(jnp.float32)
    # the largest logit is taken off before the division: a tiny temperature then gives 0 and -inf, never inf - inf
    scaled = (scaled - jnp.max(scaled, axis=-1, keepdims=True)) / temperature[:, None, None]
    threshold = jnp.log(sampling.min_p)[:, None, None]

    def raise_threshold(threshold):
        ordered = -jnp.sort(-scaled, axis=-1)
        vocab_size = logits.shape[-1]
        kept = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab_size), vocab_size)[:, None, None]
        # a token that ties with the last one kept stays too
        in_top_k = ordered >= jnp.take_along_axis(ordered, kept - 1, axis=-1)
        mass = jnp.where(in_top_k, jnp.exp(ordered), 0.0)
        before = jnp.cumsum(mass, axis=-1) - mass
        # a token is kept while the mass in front of it is below top_p; the first always is
        is_kept = in_top_k & ((before < sampling.top_p[:, None, None] * jnp.sum(mass, axis=-1, keepdims=True)) | (before == 0))
        is_kept = is_kept | (in_top_k & (sampling.top_p == 1)[:, None, None])
        return jnp.maximum(threshold, jnp.min(jnp.where(is_kept, ordered, jnp.inf), axis=-1, keepdims=True))

    is_sorted = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    threshold = jnp.broadcast_to(threshold, (*logits.shape[:2], 1))
    threshold = jax.lax.cond(is_sorted, raise_threshold, lambda threshold: threshold, threshold)
    return jnp.where(scaled >= threshold, scaled, -jnp.inf)


def banned(
    bans: Bans | None, stop_token_ids: Int[Array, " Z"], depths: Int[Array, "B N"], *, vocab_size: int
) -> Bool[Array, "B N V"] | None:
    """Which tokens may not be drawn behind depths further tokens of each row: banned ones, and stop tokens as long as the row owes more."""
    if bans is None:
        return None

    def among(ids):
        return jnp.zeros((vocab_size,), bool).at[jnp.where(ids < 0, vocab_size, ids)].set(True, mode="drop")

    is_early = depths < bans.num_owed[:, None]
    return among(bans.token_ids)[None, None] | (is_early[..., None] & among(stop_token_ids)[None, None])


def choose(
    logits: Float[Array, "B N V"],
    sampling: Sampling,
    noise: Float[Array, "B J V"],
    noise_indices: Int[Array, "B N"],
    is_banned: Bool[Array, "B N V"] | None = None,
) -> Choice:
    """Pick one token a place: argmax at temperature 0, else argmax of filtered logits plus the noise row named by noise_indices.

    is_banned: tokens left out before anything else; the log-probabilities are those of the model with them in, the processed ones without.
    """
    # cast where it is read, not here: a branch below would be given a float32 copy of all logits
    log_normalizer = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    is_sampled = sampling.temperature > 0
    allowed = logits if is_banned is None else jnp.where(is_banned, jnp.asarray(-jnp.inf, logits.dtype), logits)
    greedy = argmax(allowed)

    def sample():
        filtered = filter_logits(allowed, sampling)
        perturbed = filtered + jnp.take_along_axis(noise, noise_indices[:, :, None], axis=1)
        tokens = jnp.where(is_sampled[:, None], argmax(perturbed), greedy)
        chosen = _at(filtered, tokens) - jax.nn.logsumexp(filtered, axis=-1)
        return tokens, jnp.where(is_sampled[:, None], chosen, 0.0)

    tokens, processed = jax.lax.cond(jnp.any(is_sampled), sample, lambda: (greedy, jnp.zeros(greedy.shape, jnp.float32)))
    return Choice(tokens=tokens, log_probs=_at(logits, tokens).astype(jnp.float32) - log_normalizer, processed_log_probs=processed)


def argmax(x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Index of the largest entry, the first one on ties. Two plain reductions: 2.8x faster than `jnp.argmax` on CPU at small V."""
    size = x.shape[-1]
    indices = jnp.arange(size, dtype=jnp.int32)
    found = jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), indices, size), axis=-1)
    return jnp.minimum(found, size - 1)  # all-NaN input equals nothing


def _block_noise(keys: Key[Array, " B"], positions: Int[Array, "B M K"], *, stream: int, first_block: int, size: int) -> Array:
    """Gumbel noise [B M K size] of a stream, by row, number of the block and position."""

    def draw(key, block, positions):
        key = jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(stream)), block)
        return position_noise(key[None], positions[None], vocab_size=size)[0]

    blocks = first_block + jnp.arange(positions.shape[1], dtype=jnp.uint32)
    return jax.vmap(jax.vmap(draw, (None, 0, 0)), (0, None, 0))(keys, blocks, positions)


def _at(x: Float[Array, "B N V"], tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]
