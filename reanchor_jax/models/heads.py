"""What makes the drafted tokens of a block depend on each other: corrections of its logits by the tokens before, or one choice for all.

In: the tokens before, their embeddings, the block states that predict the next ones, and a sequential head's own state.
Out: an additive correction of the logits (and the state after that token); confidences; states under each component of a mixture.
Source: Domino (arXiv 2605.29707): a GRU over the tokens so far; DSpark (arXiv 2607.05147): low-rank first-order terms;
    xPress (arXiv 2608.02438): a causal refiner of whole blocks; DBLast (arXiv 2608.05448): a latent mixture. Of the last two no tensors are
    published, so the details are ours.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reanchor_jax.config import ConfidenceConfig, HeadConfig, MixtureConfig
from reanchor_jax.models.layers import GatedMLP, RMSNorm, linear

_NUM_MLPS = 2  # of a refiner


class GRUHead(nnx.Module):
    """Domino: output(silu(inner([z ; h]))), h a GRU's state after the anchor and all drafted tokens so far.

    Rows of the GRU's maps are reset, update, candidate, as in PyTorch; no biases.
    """

    def __init__(self, config: HeadConfig, *, width: int, vocab_size: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.from_token = linear(width, 3 * config.size, dtype=dtype, rngs=rngs)
        self.from_state = linear(config.size, 3 * config.size, dtype=dtype, rngs=rngs)
        self.inner = linear(width + config.size, config.inner_size, dtype=dtype, rngs=rngs)
        self.output = linear(config.inner_size, vocab_size, dtype=dtype, rngs=rngs)

    def start(self, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*batch G"]:
        """State before the anchor."""
        return jnp.zeros((*shape, self.config.size), dtype)

    def __call__(
        self,
        state: Float[Array, "*batch G"],
        tokens: Int[Array, "*batch"],
        embedded: Float[Array, "*batch D"],
        z: Float[Array, "*batch D"],
    ) -> tuple[Float[Array, "*batch G"], Float[Array, "*batch V"]]:
        """Take in the token before; return the new state and the correction of the next token's logits. tokens are not used."""
        from_token, from_state = (jnp.split(part, 3, axis=-1) for part in (self.from_token(embedded), self.from_state(state)))
        reset = jax.nn.sigmoid(from_token[0] + from_state[0])
        update = jax.nn.sigmoid(from_token[1] + from_state[1])
        candidate = jnp.tanh(from_token[2] + reset * from_state[2])
        state = (1 - update) * candidate + update * state
        return state, self.output(jax.nn.silu(self.inner(jnp.concatenate([z, state], axis=-1))))


class MarkovHead(nnx.Module):
    """DSpark: output(f(e)), e a low-rank embedding of the token before; f is the identity, a gate, or a small recurrence."""

    def __init__(self, config: HeadConfig, *, width: int, vocab_size: int, num_outputs: int, dtype: DTypeLike, rngs: nnx.Rngs):
        rank = config.size
        self.config = config
        self.embedding = nnx.Embed(vocab_size, rank, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.output = linear(rank, num_outputs, dtype=dtype, rngs=rngs)

        def biased(num_inputs, num_outputs):
            return nnx.Linear(num_inputs, num_outputs, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.gate = biased(width + rank, rank) if config.kind == "gated_markov" else None
        self.joint = biased(width + 2 * rank, 3 * rank) if config.kind == "rnn_markov" else None

    def start(self, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*batch G"]:
        """State before the anchor; 0 wide where the head has none."""
        return jnp.zeros((*shape, 0 if self.joint is None else self.config.size), dtype)

    def __call__(
        self,
        state: Float[Array, "*batch G"],
        tokens: Int[Array, "*batch"],
        embedded: Float[Array, "*batch D"],
        z: Float[Array, "*batch D"],
    ) -> tuple[Float[Array, "*batch G"], Float[Array, "*batch V"]]:
        """Take in the token before; return the new state and the correction of the next token's logits. embedded is not used."""
        e = self.embedding(tokens)
        if self.gate is not None:
            e = jax.nn.sigmoid(self.gate(jnp.concatenate([z, e], axis=-1))) * e
        elif self.joint is not None:
            gate, candidate, out = jnp.split(self.joint(jnp.concatenate([state, e, z], axis=-1)), 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state, e = gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)
        return state, self.output(e)


class RefinerHead(nnx.Module):
    """xPress: output(MLPs(f + mixed(f))), f low-rank features of a slot: of its state, the block's mean state and the token before it.

    mixer: weight of each channel of what a slot (first axis) reads of another (second axis); only those before it are read.
    """

    def __init__(
        self,
        config: HeadConfig,
        *,
        width: int,
        vocab_size: int,
        num_outputs: int,
        num_drafts: int,
        epsilon: float,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        rank = config.size
        self.config = config
        self.from_state = linear(width, rank, dtype=dtype, rngs=rngs)
        self.from_mean = linear(width, rank, dtype=dtype, rngs=rngs)
        self.embedding = nnx.Embed(vocab_size, rank, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.mixer = nnx.Param(jnp.zeros((num_drafts, num_drafts, rank), dtype))
        self.norms = nnx.List([RMSNorm(rank, epsilon=epsilon, dtype=dtype) for _ in range(_NUM_MLPS)])
        self.mlps = nnx.List([GatedMLP(rank, config.inner_size, activation="silu", dtype=dtype, rngs=rngs) for _ in range(_NUM_MLPS)])
        self.output = linear(rank, num_outputs, dtype=dtype, rngs=rngs)

    def read(self, states: Float[Array, "*batch K1 D"]) -> Float[Array, "*batch K1 r"]:
        """The part of the features that is the same whatever the tokens are."""
        return self.from_state(states) + self.from_mean(jnp.mean(states, axis=-2, keepdims=True))

    def __call__(self, read: Float[Array, "*batch K1 r"], previous: Int[Array, "*batch K1"]) -> Float[Array, "*batch K1 V1"]:
        """Corrections of all slots' logits. read: of `read`. previous: the token before each slot; a correction reads none behind it."""
        features = read + self.embedding(previous)
        is_before = jnp.tri(features.shape[-2], k=-1, dtype=features.dtype)[:, :, None]
        x = features + jnp.einsum("IJr,...Jr->...Ir", self.mixer[...] * is_before, features)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            x = x + mlp(norm(x))
        return self.output(x)


class ConfidenceHead(nnx.Module):
    """DSpark: log-odds that a drafted token is accepted, given that all before it are."""

    def __init__(self, config: ConfidenceConfig, *, width: int, rank: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        num_inputs = width + (rank if config.reads_previous else 0)
        self.output = nnx.Linear(num_inputs, 1, use_bias=config.has_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, z: Float[Array, "*batch K1 D"], previous: Float[Array, "*batch K1 r"] | None) -> Float[Array, "*batch K1"]:
        """Log-odds in float32, divided by the calibration's temperatures. previous: Markov embeddings of the tokens before."""
        inputs = z if previous is None else jnp.concatenate([z, previous], axis=-1)
        log_odds = self.output(inputs)[..., 0].astype(jnp.float32)
        if not self.config.temperatures:
            return log_odds
        temperatures = jnp.asarray(self.config.temperatures, jnp.float32)
        return log_odds / jnp.expand_dims(temperatures, range(log_odds.ndim - 1))


class LatentMixture(nnx.Module):
    """DBLast: h + up_z(silu(down(h))), z one component for all slots of a block; the anchor's state says how likely each is."""

    def __init__(self, config: MixtureConfig, *, width: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.down = linear(width, config.size, dtype=dtype, rngs=rngs)
        self.up = linear(config.size, (config.num_components, width), dtype=dtype, rngs=rngs)
        self.prior = linear(width, config.num_components, dtype=dtype, rngs=rngs)

    def log_priors(self, anchor_states: Float[Array, "*batch D"]) -> Float[Array, "*batch Z"]:
        """Log-probability of each component, in float32. anchor_states: of the blocks' first slots."""
        return jax.nn.log_softmax(self.prior(anchor_states).astype(jnp.float32), axis=-1)

    def __call__(self, states: Float[Array, "*batch D"]) -> Float[Array, "*batch Z D"]:
        """States under every component."""
        return jnp.expand_dims(states, -2) + self.up(jax.nn.silu(self.down(states)))
