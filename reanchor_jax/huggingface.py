"""Read the `config.json` dicts of published models into our records.

In: the dict of a `config.json` (and of a `generation_config.json`).
Out: TargetConfig, DrafterConfig; ValueError naming the field for everything the model code does not implement.
Source: transformers' Llama, Qwen3 and Gemma-4 configs; drafter configs of z-lab, DeepSpec, SpecForge, speculators, ModelOpt, AngelSlim and
    AngelSpec, each with its own layout (`_flat` brings them into one).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from reanchor_jax.config import ConfidenceConfig, DrafterConfig, Family, HeadConfig, HeadKind, LayerConfig, RopeConfig, TargetConfig

OPTIONS = "reanchor_jax"  # key of a drafter's config dict under which conversion stores what it has found out

_GEMMA4 = ("gemma4_unified", "gemma4_unified_text")
_ALIGNMENT = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
_MARKOV_KINDS: dict[str, HeadKind] = {"vanilla": "markov", "gated": "gated_markov", "rnn": "rnn_markov"}

_DEEPSPEC = ("Qwen3DSparkModel", "Gemma4DSparkModel")
_DFLARE = ("QwenDFlareDraftModel", "DFlareDraftModel", "DFlareQwen3Model")
_DRAFTERS = ("DFlashDraftModel", "DominoDraftModel", "DSparkDraftModel", *_DEEPSPEC, *_DFLARE)
# what is known and not implemented: a word of its architecture or type, its name, what to do
_KNOWN = (
    ("dflash2", "DFlash 2 (grouped convolutions and a candidate selector)", "use the target's first DFlash drafter"),
    ("dfly", "DFly (fused context with hidden correction)", "use a DFlare drafter"),
    ("eagle", "an EAGLE drafter", "use a DFlash-family drafter of the same target"),
    ("deepseekv4", "a DeepSeek-V4 bundle", "use a drafter published apart from its target"),
    ("assistant", "an MTP assistant", "use a DFlash-family drafter of the same target"),
)
# switches seen in published configs that change what is computed, with the value that changes nothing
_NEUTRAL = {
    "attention_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": None,
    "log_snr_conditioning": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
    "use_swa": False,
    "use_gemma_norm": False,
    "use_bias_gate": False,
    "use_bias_norm": False,
    "enable_qwen35_gated_q_proj": False,
    "enable_hidden_correction": False,
    "quantization_config": None,
    "quantization": None,
}


def read_target(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> TargetConfig:
    """Read the `config.json` dict of a Llama, Qwen3 or Gemma-4 (`gemma4_unified`, its text part) target.

    generation_config: the dict of `generation_config.json`; its `eos_token_id` (an int or a list) wins over the model config's.
    """
    kind = config.get("model_type")
    eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
    if kind in _GEMMA4:
        text = config.get("text_config", config)
        _refuse_quantised(config)
        _refuse_quantised(text)
        eos = text.get("eos_token_id") if eos is None else eos
        return _gemma_target(text, eos)
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type {kind!r} is not a supported target; supported are llama, qwen3, gemma4_unified.")
    _refuse_quantised(config)
    _check_neutral(config, ("attention_bias", "mlp_bias"))
    _check_activation(config, "silu")
    return TargetConfig(
        family=kind,
        **_widths(config),
        layers=_layers(config, is_windowed=kind == "qwen3" and bool(config.get("use_sliding_window"))),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        max_positions=_require(config, "max_position_embeddings"),
        eos_token_ids=_as_tuple(eos),
    )


def read_drafter(config: Mapping[str, Any]) -> DrafterConfig:
    """Read the `config.json` dict of a DFlash, Draft-OPD, DFlare, Domino or DSpark drafter, whatever packaged it.

    What conversion found in the weights (`config["reanchor_jax"]`) wins over what the config says or leaves out.
    Raises ValueError for other architectures and for a missing block_size, mask_token_id or target_layer_ids
    (fallbacks are wrong for most published checkpoints).
    """
    flat = _flat(config)
    options = {**read_options(config), **config.get(OPTIONS, {})}
    head, confidence = options.pop("head"), options.pop("confidence")
    is_gemma, is_speculators = _is_gemma(flat), "transformer_layer_config" in config
    num_slots = int(_require_drafter(flat, "block_size"))
    num_drafts = options.pop("num_drafts")
    causal = flat.get("causal") if flat.get("is_causal") is None else flat["is_causal"]
    causal = False if flat.get("sliding_window_non_causal") else causal
    # layer_types alone says which layers slide, whatever use_sliding_window says; without it, transformers' rule by layer number
    is_windowed = flat.get("layer_types") is not None or bool(flat.get("use_sliding_window"))
    layers = _gemma_layers(flat) if is_gemma else _layers(flat, is_windowed=is_windowed)
    family: Family = "gemma4" if is_gemma else "qwen3"
    own_scale = math.sqrt(_require(flat, "hidden_size")) if is_gemma else None
    softcap = flat.get("final_logit_softcapping")
    return DrafterConfig(
        family=family,
        **_widths(flat),
        # without is_causal, sliding layers are causal inside the block and full layers are not
        layers=tuple(replace(layer, is_causal=layer.window is not None if causal is None else bool(causal)) for layer in layers),
        num_slots=num_slots,
        num_drafts=num_slots - (0 if options["is_shifted"] else 1) if num_drafts is None else int(num_drafts),
        mask_token_id=int(_require_drafter(flat, "mask_token_id")),
        target_layer_ids=tuple(int(tap) for tap in _require_drafter(flat, "target_layer_ids")),
        num_target_layers=None if is_speculators else int(_require_drafter(flat, "num_target_layers")),
        head=None if head is None else HeadConfig(**head),
        confidence=None if confidence is None else ConfidenceConfig(**{**confidence, "temperatures": tuple(confidence["temperatures"])}),
        embedding_scale=own_scale if flat.get("input_embedding_scale") is None else float(flat["input_embedding_scale"]),
        output_multiplier=float(flat.get("output_multiplier") or 1.0),
        softcap=None if softcap is None else float(softcap),
        **options,
    )


def read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a drafter's config says about fusion, alignment, head and ownership, as keyword arguments of DrafterConfig (JSON values)."""
    _refuse_known(config)
    flat = _flat(config)
    _check_neutral(flat, tuple(_NEUTRAL))
    _check_activation(flat, "gelu_pytorch_tanh" if _is_gemma(flat) else "silu")
    architectures = tuple(flat.get("architectures") or ())
    is_speculators = "transformer_layer_config" in config
    if not is_speculators and not any(name in _DRAFTERS for name in architectures):
        raise ValueError(f"architectures {list(architectures)} is not a supported drafter; supported are {', '.join(_DRAFTERS)}.")
    projector = {"causal_v5": "domino"}.get(flat.get("projector_type", ""), flat.get("projector_type"))
    is_domino = projector == "domino" or "DominoDraftModel" in architectures
    is_dspark = (
        projector == "dspark"
        or any("DSpark" in name for name in architectures)
        or "dspark" in (flat.get("model_type"), config.get("speculators_model_type"))
    )
    is_dflare = any(name in _DFLARE for name in architectures) or "dflare" in (flat.get("model_arch"), projector)
    head = confidence = None
    if is_domino:
        plain = int(flat.get("pure_draft_prefix_len") or 0)
        head = HeadConfig(
            kind="gru", size=_require_drafter(flat, "gru_hidden_dim"), inner_size=_require_drafter(flat, "emb_dim"), num_plain=plain
        )
    elif is_dspark and flat.get("markov_rank"):
        kind = flat.get("markov_head_type") or "vanilla"
        if kind not in _MARKOV_KINDS:
            raise ValueError(f"markov_head_type {kind!r} is not supported; known are {', '.join(_MARKOV_KINDS)}.")
        head = HeadConfig(kind=_MARKOV_KINDS[kind], size=flat["markov_rank"])
    if is_dspark and (flat.get("enable_confidence_head") or flat.get("use_confidence_head")):
        reads = bool(flat.get("confidence_head_with_markov", flat.get("use_confidence_head"))) and head is not None
        confidence = ConfidenceConfig(reads_previous=reads, temperatures=tuple(flat.get("confidence_temperatures") or ()))
    owns = any(name in _DEEPSPEC for name in architectures) or is_speculators
    return {
        "is_shifted": _is_shifted(flat, is_dspark=is_dspark, is_domino=is_domino, is_speculators=is_speculators),
        "fusion": "per_layer" if is_dflare else "concatenated",
        "head": None if head is None else asdict(head),
        "confidence": None if confidence is None else {**asdict(confidence), "temperatures": list(confidence.temperatures)},
        "has_embedding": owns,
        "has_head": owns,
        "draft_vocab_size": None if flat.get("draft_vocab_size") in (None, flat.get("vocab_size")) else int(flat["draft_vocab_size"]),
        "num_drafts": None,
    }


def states_alignment(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's config says which position a slot predicts, rather than leaving it to its family."""
    flat = _flat(config)
    return any(flat.get(name) is not None for name in _ALIGNMENT)


def _is_shifted(flat: Mapping[str, Any], *, is_dspark: bool, is_domino: bool, is_speculators: bool) -> bool:
    """Whether slot k predicts the token after its own position. A wrong answer crashes nothing and costs most of the acceptance."""
    for name in _ALIGNMENT:
        if flat.get(name) is not None:
            return bool(flat[name])
    if is_domino or "model_arch" in flat:  # AngelSpec trains DSpark unshifted
        return False
    if is_speculators:
        methods = (flat.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return methods[0].get("speculative_tokens") == flat.get("block_size")
    return is_dspark


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level of fields whatever the packaging: `dflash_config` wins over the top level; speculators' backbone has a dict of its own."""
    nested = config.get("transformer_layer_config") or {}
    flat = {
        **nested,
        **{name: value for name, value in config.items() if name not in ("transformer_layer_config", "model_type") or not nested},
    }
    for name, value in (config.get("dflash_config") or {}).items():
        if value is not None:
            flat[name] = value
    if nested and "target_layer_ids" not in flat and "aux_hidden_state_layer_ids" in flat:
        flat["target_layer_ids"] = [index - 1 for index in flat["aux_hidden_state_layer_ids"]]  # counted from the embedding there
    if flat.get("target_num_hidden_layers") is not None:  # AngelSpec counts taps in num_target_layers
        flat["num_target_layers"] = flat["target_num_hidden_layers"]
    return flat


def _refuse_known(config: Mapping[str, Any]) -> None:
    """Name what is recognised but not implemented, and say what to use instead."""
    told = [*(config.get("architectures") or ()), config.get("model_type"), config.get("speculators_model_type"), config.get("model_arch")]
    words = [str(word).lower().replace("_", "").replace("-", "") for word in told]
    if "dspark_block_size" in config:
        words.append("deepseekv4")
    nested = config.get("dflash_config") or {}
    if "conv_kernel_size" in nested or "selector_rank" in nested:
        words.append("dflash2")
    for word, name, advice in _KNOWN:
        if any(word in found for found in words):
            raise ValueError(f"this is {name}, which is not supported yet; {advice}.")
    _refuse_quantised(config)


def _refuse_quantised(config: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "quantization"):
        if config.get(name):
            raise ValueError(f"this is a quantised checkpoint ({name}), which is not supported yet; use its bfloat16 original.")


def _gemma_target(text: Mapping[str, Any], eos: Any) -> TargetConfig:
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "attention_bias"):
        if text.get(name):
            raise ValueError(f"{name}={text[name]} is not supported; only Gemma-4 models without it are (the 12B).")
    if text.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention='all' is not supported; a target must be causal.")
    _check_activation(text, "gelu_pytorch_tanh")
    softcap = text.get("final_logit_softcapping")
    return TargetConfig(
        family="gemma4",
        **_widths(text),
        layers=_gemma_layers(text),
        is_tied=bool(text.get("tie_word_embeddings", True)),
        max_positions=_require(text, "max_position_embeddings"),
        eos_token_ids=_as_tuple(eos),
        embedding_scale=math.sqrt(_require(text, "hidden_size")),
        softcap=float(softcap) if softcap else None,
    )


def _gemma_layers(text: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Layers of two kinds; sizes of the full ones from `per_layer_config` (transformers >= 5.15) or `global_head_dim` (hub)."""
    kinds = _layer_kinds(text)
    overrides = text.get("per_layer_config") or {}
    shares_value = bool(text.get("attention_k_eq_v"))
    layers = []
    for index, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        own = overrides.get(str(index), overrides.get(index, {}))
        heads, size = _require(text, "num_key_value_heads"), _require(text, "head_dim")
        if is_full and not overrides:
            size = _require(text, "global_head_dim")
            heads = (text.get("num_global_key_value_heads") if shares_value else None) or heads
        layers.append(
            LayerConfig(
                num_kv_heads=own.get("num_key_value_heads") or heads,
                head_size=own.get("head_dim") or size,
                rope=read_rope(text, kind),
                window=None if is_full else int(_require(text, "sliding_window")),
                has_value=not (is_full and shares_value),
            )
        )
    return tuple(layers)


def _layers(config: Mapping[str, Any], *, is_windowed: bool) -> tuple[LayerConfig, ...]:
    """Layers of one shape; those of `layer_types` sliding_attention are windowed, if windows are used at all."""
    heads = _require(config, "num_attention_heads")
    shape = LayerConfig(
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or _require(config, "hidden_size") // heads,
        rope=read_rope(config),
    )
    # transformers' rule where layer_types is absent: layers from max_window_layers (default 28) on slide, if windows are used at all
    has_default = is_windowed and bool(config.get("sliding_window"))
    default = [
        "sliding_attention" if has_default and index >= config.get("max_window_layers", 28) else "full_attention"
        for index in range(_require(config, "num_hidden_layers"))
    ]
    kinds = _layer_kinds(config, default)
    if is_windowed and "sliding_attention" in kinds and not config.get("sliding_window"):
        raise ValueError("layer_types names a sliding_attention layer but sliding_window is missing; add it to config.json.")
    is_sliding = [is_windowed and kind == "sliding_attention" for kind in kinds]
    return tuple(replace(shape, window=int(config["sliding_window"]) if sliding else None) for sliding in is_sliding)


def _layer_kinds(config: Mapping[str, Any], default: Sequence[str] | None = None) -> list[str]:
    num_layers = _require(config, "num_hidden_layers")
    kinds = list(config.get("layer_types") or default or _require(config, "layer_types"))
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers; fix config.json.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; known are full_attention and sliding_attention.")
    return kinds


def read_rope(config: Mapping[str, Any], layer_kind: str | None = None) -> RopeConfig:
    """Read `rope_parameters` (transformers 5; Gemma-4 has one for each kind of layer) or `rope_theta` with `rope_scaling` (older)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if layer_kind is not None and layer_kind in scaling:
        scaling = dict(scaling[layer_kind])
    elif "full_attention" in scaling or "sliding_attention" in scaling:
        raise ValueError("rope_parameters for each kind of layer are supported in Gemma-4 models only, and need one for every kind used.")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError(
            "rope_theta is missing from the config (neither at the top level nor in rope_parameters); "
            "guessing 10000 would be silently wrong, so add it to config.json."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rate = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rate = 1.0 if rate is None else rate
    if scaling.get("rope_dim") not in (None, config.get("head_dim")):
        raise ValueError(f"rope_dim {scaling['rope_dim']} is not supported; only the whole head ({config.get('head_dim')}) is rotated.")
    if kind == "proportional":
        return RopeConfig(theta=float(theta), kind="proportional", rotated_rate=float(rate))
    if rate != 1.0:
        raise ValueError(f"partial_rotary_factor {rate} is supported with rope_type proportional only; got {kind}.")
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported; known types are default, llama3, yarn, proportional.")
    factor = float(_require(scaling, "factor"))
    original = int(scaling.get("original_max_position_embeddings") or _require(config, "max_position_embeddings"))
    if kind == "llama3":
        return RopeConfig(
            theta=float(theta),
            kind="llama3",
            factor=factor,
            low_frequency_factor=float(_require(scaling, "low_freq_factor")),
            high_frequency_factor=float(_require(scaling, "high_freq_factor")),
            original_max_positions=original,
        )
    return RopeConfig(
        theta=float(theta),
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor),
        is_truncated=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Magnitude correction of YaRN: 0.1 ln(factor) + 1 unless the config states its own."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _widths(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": _require(config, "vocab_size"),
        "width": _require(config, "hidden_size"),
        "num_heads": _require(config, "num_attention_heads"),
        "mlp_width": _require(config, "intermediate_size"),
        "norm_epsilon": _require(config, "rms_norm_eps"),
    }


def _is_gemma(flat: Mapping[str, Any]) -> bool:
    return "Gemma4DSparkModel" in (flat.get("architectures") or ())


def _as_tuple(eos: Any) -> tuple[int, ...]:
    return () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)


def _require(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config.json lacks {name!r}; add it.")
    return config[name]


def _require_drafter(flat: Mapping[str, Any], name: str) -> Any:
    if flat.get(name) is None:
        raise ValueError(f"{name} is missing from the drafter config (looked in dflash_config and at the top level); add it.")
    return flat[name]


def _check_activation(config: Mapping[str, Any], wanted: str) -> None:
    found = config.get("hidden_activation", config.get("hidden_act", wanted))
    if found != wanted:
        raise ValueError(f"hidden_act {found!r} is not supported; only {wanted} is.")


def _check_neutral(config: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        neutral = _NEUTRAL.get(name, False)
        value = config.get(name)
        if value is not None and value != neutral:
            raise ValueError(f"{name}={value} is not supported; only checkpoints without it are.")
