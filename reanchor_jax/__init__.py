"""Lossless speculative decoding in JAX: ReAnchor on block-diffusion drafters.

Axis letters, one meaning each, in types, einsums and docstrings:
B rows, P prompt tokens or places of a path, T tokens of this call, S cache slots or places of a training sequence,
K tokens of a block or slots of a drafting pass, K1 drafted tokens, M blocks (baseline + shifted) or paths,
N trie nodes, V vocabulary, D width, H query heads, G key/value heads, R = H/G or retained entries, A width of a head,
F width of a feature or of the MLP, L layers, E taps, C training anchors, Z stop ids, J positions that have noise,
W entries of a training window or heads of a growing tree, Q candidates of a slot.
"""

from reanchor_jax.checkpoint import load, save
from reanchor_jax.config import DrafterConfig, TargetConfig
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.loop import autoregress, generate, prefill, step
from reanchor_jax.decoding.sampling import Sampling, make_sampling
from reanchor_jax.decoding.state import FINISH_REASONS, DecodeState, Generation
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.pairs import load_pair
from reanchor_jax.statistics import StepInfo, Summary, acceptance_lengths, summarize, tau_per_prompt

__all__ = [
    "FINISH_REASONS",
    "DecodeConfig",
    "DecodeState",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "Models",
    "Sampling",
    "StepInfo",
    "Summary",
    "Target",
    "TargetConfig",
    "acceptance_lengths",
    "autoregress",
    "generate",
    "load",
    "load_pair",
    "make_sampling",
    "prefill",
    "save",
    "step",
    "summarize",
    "tau_per_prompt",
]
