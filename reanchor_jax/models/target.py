"""One decoder stack for Llama-3.x, Qwen3 and Gemma-4, driven by its config.

In: tokens [B T] at positions [B T], a mask among them (causal for a prompt, ancestors for a trie), a cache it only reads.
Out: final states, tapped layer outputs, and the tokens' keys and values per layer; logits are a separate call.
Source: transformers' LlamaForCausalLM, Qwen3ForCausalLM and Gemma4UnifiedForCausalLM.
"""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from reanchor_jax.cache import Committed
from reanchor_jax.config import STYLES, TargetConfig
from reanchor_jax.kernels.parts import CachePart
from reanchor_jax.models.layers import DecoderLayer, RMSNorm, embed, linear, softcap


class TargetOutput(NamedTuple):
    """Result of one target pass over T tokens.

    states: after the final norm; what the head reads.
    taps: tapped layer outputs concatenated in the order asked for; E*D is 0 wide if none were.
    keys_values: of each layer, keys in rows 0..G-1, values in rows G..2G-1; not written anywhere.
    """

    states: Float[Array, "B T D"]
    taps: Float[Array, "B T ED"]
    keys_values: tuple[Float[Array, "B 2G T A"], ...]


class Target(nnx.Module):
    """Autoregressive target model; weights [inputs, outputs]."""

    def __init__(self, config: TargetConfig, *, dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs):
        style = STYLES[config.family]
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.width, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(
                    layer,
                    width=config.width,
                    num_heads=config.num_heads,
                    mlp_width=config.mlp_width,
                    is_split=False,
                    style=style,
                    epsilon=config.norm_epsilon,
                    dtype=dtype,
                    rngs=rngs,
                )
                for layer in config.layers
            ]
        )
        self.norm = RMSNorm(config.width, epsilon=config.norm_epsilon, dtype=dtype, is_wide=style.is_norm_wide)
        self.head = None if config.is_tied else linear(config.width, config.vocab_size, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        *,
        committed: Committed | None = None,
        target_layer_ids: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run T tokens beside a cache.

        mask: which of the T tokens each token sees. committed: cache the tokens follow.
        target_layer_ids: 0-based layers to tap, -1 for the embedded tokens; the last layer's tap is taken after the final norm, as
            transformers reports it.
        """
        x = self.embed(tokens)
        taps, keys_values = {-1: x}, []
        for index, layer in enumerate(self.layers):
            window = self.config.layers[index].window
            visible = mask if window is None else mask & (positions[:, None, :] > positions[:, :, None] - window)
            part = None if committed is None else CachePart(keys_values=committed.layers[index], lengths=committed.lengths)
            x, own = layer(x, positions, visible, cache=part)
            keys_values.append(own)
            taps[index] = x
        states = self.norm(x)
        taps[self.config.num_layers - 1] = states
        tapped = [taps[index] for index in target_layer_ids]
        return TargetOutput(
            states=states,
            taps=jnp.concatenate(tapped, axis=-1) if tapped else states[..., :0],
            keys_values=tuple(keys_values),
        )

    def embed(self, tokens: Int[Array, "*batch"], *, scale: float | None = None) -> Float[Array, "*batch D"]:
        """Embedded tokens times a scale, by default the target's own."""
        return embed(self.embedding, tokens, self.config.embedding_scale if scale is None else scale)

    def logits(self, states: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Unnormalised log-probabilities of the next token, in the dtype of the weights."""
        return softcap(self.project(states), self.config.softcap)

    def project(self, states: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """The head alone: logits before the soft cap."""
        if self.head is not None:
            return self.head(states)
        # one row, on the right: on the left, jax 0.11 and later read the table at a quarter of the speed
        if states.size == self.config.width:
            return (self.embedding.embedding[...] @ states.reshape(-1)).reshape(*states.shape[:-1], -1)
        return self.embedding.attend(states)
