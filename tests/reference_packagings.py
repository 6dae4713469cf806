"""Published layouts of drafters: the `config.json` and the tensor names of each packager.

In: the target's `config.json` dict (or its vocab_size, hidden_size, num_hidden_layers), options.
Out: a Packaging, by name in PACKAGINGS.
Source: z-lab/dflash, jianuo-huang/Domino, deepseek-ai/DeepSpec, sgl-project/SpecForge, vllm-project/speculators,
NVIDIA/Model-Optimizer, Tencent/AngelSlim and Tencent/AngelSpec.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from reference_backbones import Spec

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class Packaging:
    """A drafter and its files: what it computes, its `config.json`, and the published name of each of our parameters."""

    spec: Spec
    config: dict[str, Any]
    rename: Callable[[str], str] = lambda name: name


def _dflash(target: Mapping[str, Any], **options: Any) -> Packaging:
    """z-lab, old layout: top-level block_size and rope_theta."""
    spec = _spec(target, options, _SLIDING | _SCALES)
    config = _qwen3_config(spec, "DFlashDraftModel") | _old_rope(spec)
    config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": spec.block_size}
    config["dflash_config"] = _taps_config(spec) | _scales_config(spec)
    return Packaging(spec, config)


def _dflash_new(target: Mapping[str, Any], **options: Any) -> Packaging:
    """z-lab, layout of the later retrains: dflash_config.block_size and rope_parameters."""
    spec = _spec(target, options, _SLIDING | _SCALES)
    config = _qwen3_config(spec, "DFlashDraftModel") | _new_rope(spec)
    config["dflash_config"] = {"block_size": spec.block_size} | _taps_config(spec) | _scales_config(spec)
    return Packaging(spec, config)


def _domino(
    target: Mapping[str, Any],
    *,
    shift_label: bool = True,
    projector_type: str = "domino",
    key_prefix: str = "",
    **options: Any,
) -> Packaging:
    """projector_type "causal_v5" and key_prefix "logit_head." are those of older checkpoints."""
    options = {"pure_draft_prefix_len": 1} | options
    spec = _spec(target, options, _SLIDING | {"pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"})
    spec = replace(spec, logit_head="domino", first_slot=0 if shift_label else 1)
    config = _qwen3_config(spec, "DominoDraftModel") | _old_rope(spec)
    config |= {"auto_map": {"AutoModel": "domino.DominoDraftModel"}, "block_size": spec.block_size, "emb_dim": spec.emb_dim}
    config["dflash_config"] = _taps_config(spec) | {
        "projector_type": projector_type,
        "pure_draft_prefix_len": spec.pure_draft_prefix_len,
        "emb_dim": spec.emb_dim,
        "gru_hidden_dim": spec.gru_hidden_dim,
        "shift_label": shift_label,
    }
    return Packaging(spec, config, lambda name: name.replace("logit_head.", key_prefix))


def _deepspec(target: Mapping[str, Any], **options: Any) -> Packaging:
    """Flat copy of the target's config, own embedding and head, slot k predicts the token after its own position."""
    spec = replace(_dspark_spec(target, options), first_slot=0, has_embedding=True, has_lm_head=True)
    copied = {key: value for key, value in target.items() if not key.startswith("rope_")}
    config = copied | _qwen3_config(spec, "Qwen3DSparkModel") | _new_rope(spec) | _deepspec_config(spec)
    return Packaging(spec, config)


def _deepspec_plain(target: Mapping[str, Any], **options: Any) -> Packaging:
    """DeepSpec's own DFlash baseline: its DSpark class without heads, shifted like it, and declared nowhere."""
    return _deepspec(target, markov_rank=0, enable_confidence_head=False, **options)


def _gemma4(
    target: Mapping[str, Any],
    *,
    global_head_dim: int = 16,
    num_global_key_value_heads: int = 1,
    final_logit_softcapping: float = 2.5,
    **options: Any,
) -> Packaging:
    """DeepSpec's drafter of Gemma-4 global layers. The soft-cap is small (30 in the published ones) so that it bends tiny logits."""
    spec = _dspark_spec(target, options, fixed={"rope_scaling"})
    local = {"head_dim": spec.head_dim, "num_key_value_heads": spec.num_key_value_heads}  # in the config, used by nothing
    spec = replace(
        spec,
        backbone="gemma4",
        head_dim=global_head_dim,
        num_key_value_heads=num_global_key_value_heads,
        rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25},
        input_embedding_scale=spec.hidden_size**0.5,
        final_logit_softcapping=final_logit_softcapping,
        first_slot=0,
        has_embedding=True,
        has_lm_head=True,
    )
    config = _qwen3_config(spec, "Gemma4DSparkModel") | _deepspec_config(spec)
    del config["hidden_act"], config["use_sliding_window"], config["max_window_layers"]
    config |= local | {
        "model_type": "gemma4_text",  # unverified: gemma4_unified_text is possible too, so go by the architecture
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": final_logit_softcapping,
        "global_head_dim": global_head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": num_global_key_value_heads,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {"rope_theta": spec.rope_theta, **spec.rope_scaling},
            "sliding_attention": {"rope_theta": 700.0, "rope_type": "default"},  # used by nothing
            "rope_theta": None,
            "rope_type": "default",
        },
        "sliding_window": 1024,
        "target_model_type": "gemma4",
        "target_text_model_type": "gemma4_text",
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    }
    return Packaging(spec, config)


def _gemma4_plain(target: Mapping[str, Any], **options: Any) -> Packaging:
    return _gemma4(target, markov_rank=0, enable_confidence_head=False, **options)


def _specforge(target: Mapping[str, Any], **options: Any) -> Packaging:
    """Everything of DSpark inside dflash_config; embedding and head are the target's; YaRN is meant."""
    spec = replace(_dspark_spec(target, {"rope_scaling": YARN} | options, _SLIDING), first_slot=0)
    config = _qwen3_config(spec, "DSparkDraftModel") | _new_rope(spec)
    config |= {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "block_size": spec.block_size, "rope_theta": spec.rope_theta}
    config |= {"target_hidden_size": None}
    config["dflash_config"] = _taps_config(spec) | {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0 if spec.has_confidence_head else 0.0,
        "confidence_head_with_markov": spec.confidence_head_with_markov,
        "enable_confidence_head": spec.has_confidence_head,
        "markov_head_type": _markov_head_type(spec),
        "markov_rank": spec.markov_rank,
        "projector_type": "dspark",
    }
    return Packaging(spec, config)


def _speculators(
    target: Mapping[str, Any],
    *,
    sample_from_anchor: bool | None = True,
    draft_vocab_size: int = 0,
    own_embedding: bool = True,
    sliding_window_non_causal: bool = False,
    **options: Any,
) -> Packaging:
    """vLLM's speculators. sample_from_anchor None: the key is absent, as in older exports, which means False.

    draft_vocab_size 0 means the whole vocabulary, without d2t and t2d.
    own_embedding False: the newer exporter, which leaves out embed_tokens, and lm_head too unless the vocabulary is reduced.
    """
    spec = replace(
        _dspark_spec(target, options, {"layer_types", "sliding_window"}),
        first_slot=0 if sample_from_anchor else 1,
        draft_vocab_size=draft_vocab_size,
        has_embedding=own_embedding,
        has_lm_head=own_embedding or draft_vocab_size > 0,
    )
    _refuse_unshifted_rnn(spec)
    layer_config = _qwen3_config(spec, "") | _new_rope(spec)
    for name in ("architectures", "num_target_layers"):
        del layer_config[name]
    spec = replace(spec, is_causal=False if sliding_window_non_causal else None)
    proposal = {"proposal_type": "greedy", "speculative_tokens": spec.block_size - spec.first_slot, "verifier_accept_k": 1}
    config = {
        "architectures": ["DSparkDraftModel"],
        # ids as vLLM counts them, one more than ours
        "aux_hidden_state_layer_ids": [index + 1 for index in spec.target_layer_ids],
        "block_size": spec.block_size,
        "confidence_head_with_markov": spec.confidence_head_with_markov,
        "draft_vocab_size": draft_vocab_size or spec.vocab_size,
        "dtype": "float32",
        "enable_confidence_head": spec.has_confidence_head,
        "markov_head_type": _markov_head_type(spec),
        "markov_rank": spec.markov_rank,
        "mask_token_id": spec.mask_token_id,
        "sliding_window_non_causal": sliding_window_non_causal,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "target"},
        },
        "speculators_model_type": "dspark",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config,
    }
    if sample_from_anchor is not None:
        config["sample_from_anchor"] = sample_from_anchor
    return Packaging(spec, config)


def _modelopt(target: Mapping[str, Any], **options: Any) -> Packaging:
    """Architecture of plain DFlash, heads without their parents' names; the confidence head always reads W1[previous]."""
    spec = replace(_dspark_spec(target, options), first_slot=0)
    if not spec.confidence_head_with_markov:
        raise ValueError("ModelOpt has neither markov_rank 0 nor a confidence head without W1[previous].")
    config = _qwen3_config(spec, "DFlashDraftModel") | _old_rope(spec) | {"block_size": spec.block_size, "torch_dtype": "float32"}
    del config["dtype"]
    config["dflash_config"] = _taps_config(spec) | {
        "causal": False,
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": spec.markov_rank,
        "markov_head_type": _markov_head_type(spec),
        "use_confidence_head": spec.has_confidence_head,
    }
    return Packaging(spec, config, lambda name: name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"))


def _dflare(target: Mapping[str, Any], **options: Any) -> Packaging:
    """AngelSlim: num_target_layers is the target's depth."""
    spec = replace(_spec(target, options), backbone="dflare")
    config = _qwen3_config(spec, "QwenDFlareDraftModel") | _old_rope(spec)
    config |= {"block_size": spec.block_size, "num_anchors": 512, "loss_decay_gamma": 7.0, "attention_backend": "flex_attention"}
    config |= {"tie_word_embeddings": True, "dflash_config": _taps_config(spec)}
    return Packaging(spec, config)


def _dflare_angelspec(target: Mapping[str, Any], *, has_native_names: bool = True, **options: Any) -> Packaging:
    spec = replace(_spec(target, options, fixed={"rope_scaling"}), backbone="dflare", has_embedding=True)
    return Packaging(spec, _angelspec_config(spec, "dflash", "DFlashDraftModel"), _angelspec_rename(has_native_names))


def _dspark_angelspec(target: Mapping[str, Any], *, has_native_names: bool = True, **options: Any) -> Packaging:
    """DSpark on DFlare. Unlike all other DSparks its trainer labels slot k with the token at k's own position, so slot 0 drafts nothing."""
    spec = replace(_dspark_spec(target, options, fixed={"rope_scaling"}), backbone="dflare", has_embedding=True, first_slot=1)
    _refuse_unshifted_rnn(spec)
    config = _angelspec_config(spec, "dspark", "DSparkDraftModel") | {
        "markov_rank": spec.markov_rank,
        "markov_head_type": _markov_head_type(spec),
        "enable_confidence_head": spec.has_confidence_head,
        "confidence_head_with_markov": spec.confidence_head_with_markov,
        "enable_hidden_correction": False,  # its default is true: TreeFlash's SwiGLU on the states, not modelled here
    }
    return Packaging(spec, config, _angelspec_rename(has_native_names))


PACKAGINGS: dict[str, Callable[..., Packaging]] = {
    "dflash": _dflash,
    "dflash-new": _dflash_new,
    "domino": _domino,
    "dspark-deepspec": _deepspec,
    "dflash-block7": _deepspec_plain,
    "dspark-specforge": _specforge,
    "dspark-speculators": _speculators,
    "dspark-modelopt": _modelopt,
    "dspark-angelspec": _dspark_angelspec,
    "gemma4-dspark": _gemma4,
    "gemma4-block7": _gemma4_plain,
    "dflare": _dflare,
    "dflare-angelspec": _dflare_angelspec,
}


_SIZES = {"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "block_size"}
_SIZES |= {"target_layer_ids", "mask_token_id", "rope_theta", "rope_scaling"}
_SLIDING = {"layer_types", "sliding_window", "is_causal"}
_SCALES = {"input_embedding_scale", "output_multiplier", "final_logit_softcapping"}


def _spec(target: Mapping[str, Any], options: Mapping[str, Any], extra: Set[str] = frozenset(), *, fixed: Set[str] = frozenset()) -> Spec:
    """Spec with the target's sizes, four evenly spaced taps (never the last layer) and the options given."""
    known = (_SIZES | extra) - fixed
    if unknown := options.keys() - known:
        raise TypeError(f"unknown options {sorted(unknown)}; known here are {sorted(known)} and those in the signature.")
    depth = target["num_hidden_layers"]
    defaults = {
        "target_layer_ids": sorted({round(index * (depth - 2) / 3) for index in range(4)}),
        "mask_token_id": target["vocab_size"] - 2,
    }
    given = defaults | dict(options)
    given["target_layer_ids"] = tuple(given["target_layer_ids"])
    given["layer_types"] = tuple(given.get("layer_types", ()))
    return Spec(vocab_size=target["vocab_size"], hidden_size=target["hidden_size"], num_target_layers=depth, **given)


def _dspark_spec(
    target: Mapping[str, Any], options: Mapping[str, Any], extra: Set[str] = frozenset(), *, fixed: Set[str] = frozenset()
) -> Spec:
    """`_spec` with the options markov_rank (0: no Markov head), markov_head_type, enable_confidence_head, confidence_head_with_markov."""
    options = dict(options)
    kind = options.pop("markov_head_type", "vanilla")
    rank = options.pop("markov_rank", 11)
    has_confidence = options.pop("enable_confidence_head", True)
    with_markov = options.pop("confidence_head_with_markov", rank > 0)
    if with_markov and not rank:
        raise ValueError("confidence_head_with_markov needs markov_rank > 0.")
    return replace(
        _spec(target, options, extra, fixed=fixed),
        logit_head=kind if rank else "none",
        markov_rank=rank,
        has_confidence_head=has_confidence,
        confidence_head_with_markov=with_markov,
    )


def _refuse_unshifted_rnn(spec: Spec) -> None:
    if spec.logit_head == "rnn" and spec.first_slot:
        # trainers run the recurrence over slot 0 too, servers start it after; no such checkpoint is known
        raise ValueError("an rnn Markov head whose slot 0 drafts nothing is not published: its first state is ambiguous.")


def _qwen3_config(spec: Spec, architecture: str) -> dict[str, Any]:
    config = {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.intermediate_size,
        "layer_types": list(spec.layer_types or ["full_attention"] * spec.num_hidden_layers),
        "max_position_embeddings": 512,
        "max_window_layers": spec.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.rms_norm_eps,
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": spec.sliding_window is not None,
        "vocab_size": spec.vocab_size,
    }
    return config if spec.is_causal is None else config | {"is_causal": spec.is_causal}


def _old_rope(spec: Spec) -> dict[str, Any]:
    return {"rope_theta": spec.rope_theta, "rope_scaling": spec.rope_scaling and dict(spec.rope_scaling)}


def _new_rope(spec: Spec) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": spec.rope_theta, **(spec.rope_scaling or {"rope_type": "default"})}}


def _taps_config(spec: Spec) -> dict[str, Any]:
    return {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(spec.target_layer_ids)}


def _scales_config(spec: Spec) -> dict[str, Any]:
    """The scales that differ from their defaults."""
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}
    return {name: getattr(spec, name) for name, value in neutral.items() if getattr(spec, name) != value}


def _markov_head_type(spec: Spec) -> str:
    """What a config says that states the type even where markov_rank is 0."""
    return "vanilla" if spec.logit_head == "none" else spec.logit_head


def _deepspec_config(spec: Spec) -> dict[str, Any]:
    config = _taps_config(spec) | {
        "block_size": spec.block_size,
        "enable_confidence_head": spec.has_confidence_head,
        "markov_rank": spec.markov_rank,
        "num_anchors": 512,
    }
    if spec.has_confidence_head:
        config["confidence_head_with_markov"] = spec.confidence_head_with_markov
    return config | ({"markov_head_type": spec.logit_head} if spec.markov_rank else {})


def _angelspec_config(spec: Spec, model_type: str, architecture: str) -> dict[str, Any]:
    """num_target_layers counts taps here. Its training configs leave block_size to the command line; exports name it at the top level."""
    names = ("hidden_size", "intermediate_size", "head_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {name: getattr(spec, name) for name in (*names, "vocab_size", "rms_norm_eps", "rope_theta", "block_size")} | {
        "architectures": [architecture],
        "model_type": model_type,
        "model_arch": "dflare",
        "max_position_embeddings": 512,
        "num_target_layers": len(spec.target_layer_ids),
        "target_hidden_size": spec.hidden_size,
        "target_num_hidden_layers": spec.num_target_layers,
        "tie_word_embeddings": False,
        "draft_vocab_size": spec.vocab_size,
        "torch_dtype": "float32",
        **_taps_config(spec),
    }


def _angelspec_rename(has_native_names: bool) -> Callable[[str], str]:
    """The public exporter keeps the training names; False gives those of the other packagings."""
    native = {"hidden_norm.weight": "context_norm.weight", "norm.weight": "final_norm.weight"}
    return lambda name: native.get(name, name) if has_native_names else name
