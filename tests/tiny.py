"""Tiny random models whose sizes all differ, so that a swapped axis cannot pass a test.

In: overrides of Hugging Face config dicts, a seed.
Out: config dicts of a Llama-3.x target, a Qwen3 target and a z-lab drafter; Models with random weights, norm scales included.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reanchor_jax import DrafterConfig, TargetConfig, huggingface
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target


def tiny_llama_config(**overrides: Any) -> dict[str, Any]:
    """A Llama-3.x `config.json` whose 5 rotary pairs fall into all three llama3 bands (kept, mixed, slowed)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "intermediate_size": 44,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        **overrides,
    }


def tiny_qwen3_config(**overrides: Any) -> dict[str, Any]:
    """A Qwen3 `config.json` with q/k norm, tied embedding and the older top-level rope_theta."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 14,
        "intermediate_size": 38,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": [2, 4],
        "dtype": "float32",
        **overrides,
    }


def tiny_gemma4_config(**overrides: Any) -> dict[str, Any]:
    """A Gemma-4 text `config.json` in the hub's schema: sliding layers of 4 heads x 12, full layers of one head x 16 without values."""
    return {
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "model_type": "gemma4_unified_text",
        "vocab_size": 61,
        "hidden_size": 24,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 12,
        "global_head_dim": 16,
        "intermediate_size": 46,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
        },
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
        "attention_bias": False,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 2.5,
        "use_bidirectional_attention": "vision",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
        "dtype": "float32",
        **overrides,
    }


def tiny_drafter_config(target: dict[str, Any] | None = None, **overrides: Any) -> dict[str, Any]:
    """A z-lab DFlash `config.json` (new layout) for a target's config dict, the tiny Llama's by default.

    Keys of `dflash_config` (block_size, mask_token_id, target_layer_ids) may be overridden by their own names.
    """
    target = tiny_llama_config() if target is None else target
    taps = [0, max(target["num_hidden_layers"] - 2, 1)]
    nested = {"block_size": 7, "mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    nested.update({name: overrides.pop(name) for name in tuple(nested) if name in overrides})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 34,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "num_target_layers": target["num_hidden_layers"],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "dflash_config": nested,
        **overrides,
    }


# what makes the tiny drafter one of another family; `dflash` entries go into dflash_config
FAMILIES: dict[str, dict[str, Any]] = {
    "domino": {
        "architectures": ["DominoDraftModel"],
        "dflash": {"projector_type": "domino", "shift_label": True, "gru_hidden_dim": 13, "emb_dim": 9, "pure_draft_prefix_len": 1},
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 11,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dflare": {"architectures": ["QwenDFlareDraftModel"]},
    "dspark_dflare": {
        "architectures": ["DSparkDraftModel"],
        "model_arch": "dflare",
        "markov_rank": 11,
        "markov_head_type": "gated",
        "reanchor_jax": {"has_head": True, "draft_vocab_size": 37},
    },
    "gemma4_dspark": {
        "architectures": ["Gemma4DSparkModel"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_k_eq_v": True,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 2.5,
        "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 3000.0}},
        "markov_rank": 11,
        "markov_head_type": "vanilla",
    },
}

# families of ours alone, which no PyTorch checkpoint holds; the last is both at once
UNPUBLISHED: dict[str, dict[str, Any]] = {
    "xpress": {"dflash": {"projector_type": "xpress", "refiner_rank": 11, "refiner_width": 9, "refiner_passes": 2}},
    "dblast": {"dflash": {"projector_type": "dblast", "mixture_rank": 13, "mixture_components": 3}},
    "xpress_dblast": {
        "reanchor_jax": {"is_shifted": True, "has_head": True, "draft_vocab_size": 37},
        "dflash": {"projector_type": "xpress", "refiner_rank": 11, "refiner_width": 9, "mixture_rank": 13, "mixture_components": 3},
    },
}


def tiny_family_config(family: str, target: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A drafter `config.json` of another family (a key of FAMILIES or UNPUBLISHED) for a target's config dict."""
    changes = dict({**FAMILIES, **UNPUBLISHED}[family])
    nested = changes.pop("dflash", {})
    config = tiny_drafter_config(target, **{**changes, **overrides})
    return {**config, "dflash_config": {**config["dflash_config"], **nested}}


def tiny_configs(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config dicts of a tiny target of a family (llama, qwen3, gemma4) and of its drafter."""
    target = {"llama": tiny_llama_config, "qwen3": tiny_qwen3_config, "gemma4": tiny_gemma4_config}[family]()
    return target, tiny_drafter_config(target)


def tiny_models(seed: int, *, family: str = "llama", dtype: jnp.dtype = jnp.float32, with_drafter: bool = True) -> Models:
    """Random target and drafter of `tiny_configs(family)`; numpy draws them, so nothing is compiled."""
    target, drafter = tiny_configs(family)
    return random_models(target, drafter if with_drafter else None, seed=seed, dtype=dtype)


def random_models(target: dict[str, Any], drafter: dict[str, Any] | None, *, seed: int, dtype: jnp.dtype = jnp.float32) -> Models:
    """Models of the given config dicts with random weights: kernels and embedding of std fan_in^-0.5, norm scales about 1."""
    target_config = huggingface.read_target(target)
    drafter_config = None if drafter is None else huggingface.read_drafter(drafter)
    rng = np.random.default_rng(seed)
    return Models(
        target=_fill(lambda: Target(target_config, dtype=dtype, rngs=nnx.Rngs(0)), rng, target_config),
        drafter=None
        if drafter_config is None
        else _fill(lambda: Drafter(drafter_config, dtype=dtype, rngs=nnx.Rngs(0)), rng, drafter_config),
    )


def _fill(build, rng: np.random.Generator, config: TargetConfig | DrafterConfig):
    graph, abstract = nnx.split(nnx.eval_shape(build))

    def draw(path, leaf):
        normal = rng.standard_normal(leaf.shape)
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer):  # a draft vocabulary: any distinct ids
            return jnp.asarray(np.sort(rng.permutation(61)[: leaf.size]), leaf.dtype)
        if "scale" in name:
            # where the attention scale is 1, queries of unit size would make the softmax one-hot
            size = leaf.size**-0.5 if "query_norm" in name and config.family == "gemma4" else 1.0
            return jnp.asarray(size * (1.0 + 0.25 * normal), leaf.dtype)
        if leaf.ndim == 1:
            return jnp.asarray(0.5 * normal, leaf.dtype)
        return jnp.asarray(normal * leaf.shape["embedding" in name] ** -0.5, leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(draw, abstract))
