"""What makes the drafted tokens of a block depend on each other: corrections of the block's logits, one token after another.

In: the token before, its embedding, the block state that predicts the next one, and the head's own state.
Out: an additive correction of the logits, and the state after that token; a confidence where the head has one.
Source: Domino (arXiv 2605.29707): a GRU over the tokens so far; DSpark (arXiv 2607.05147): low-rank first-order terms.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from reanchor_jax.config import ConfidenceConfig, HeadConfig
from reanchor_jax.models.layers import linear


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
