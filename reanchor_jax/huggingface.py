"""Read the `config.json` dicts of published models into our records.

In: the dict of a `config.json` (and of a `generation_config.json`).
Out: TargetConfig, DrafterConfig; ValueError naming the field for everything the model code does not implement.
Source: transformers' Llama, Qwen3 and Gemma-4 configs; drafter configs of z-lab, DeepSpec, SpecForge, speculators, ModelOpt, AngelSlim and
    AngelSpec, each with its own layout (`_flat` brings them into one).
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

from reanchor_jax.config import (
    ConfidenceConfig,
    DrafterConfig,
    Family,
    Fusion,
    HeadConfig,
    HeadKind,
    LayerConfig,
    MixtureConfig,
    RopeConfig,
    TargetConfig,
)
from reanchor_jax.fields import (
    MOST_LAYERS,
    boolean,
    integer,
    integers,
    is_integer,
    number,
    numbers,
    section,
    sections,
    string,
    strings,
)

OPTIONS = "reanchor_jax"  # key of a drafter's config dict under which conversion stores what it has found out

_STORED = ("is_shifted", "fusion", "head", "confidence", "has_embedding", "has_head", "draft_vocab_size", "num_drafts")
_HEAD, _CONFIDENCE = ("kind", "size", "inner_size", "num_plain"), ("reads_previous", "has_bias", "temperatures")
_MOST_SLOTS = 1024  # of a block; published ones have up to 16
_REFINER_PASSES = 6  # xPress' own

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
    "dspark_bonus_anchor": False,
    "quantization_config": None,
    "quantization": None,
}


def read_target(config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> TargetConfig:
    """Read the `config.json` dict of a Llama, Qwen3 or Gemma-4 (`gemma4_unified`, its text part) target.

    generation_config: the dict of `generation_config.json`; its `eos_token_id` (an int or a list) wins over the model config's.
    """
    kind = string(config, "model_type", None)
    generation = generation_config or {}
    if kind in _GEMMA4:
        text = section(config, "text_config", config)
        _refuse_quantised(config)
        _refuse_quantised(text)
        return _gemma_target(text, _end_tokens(generation, config, text))
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type {kind!r} is not a supported target; supported are llama, qwen3, gemma4_unified.")
    _refuse_quantised(config)
    _check_neutral(config, ("attention_bias", "mlp_bias"))
    _check_activation(config, "silu")
    return TargetConfig(
        family=kind,
        **_widths(config),
        layers=_layers(config, is_windowed=kind == "qwen3" and boolean(config, "use_sliding_window", False)),
        is_tied=boolean(config, "tie_word_embeddings", False),
        max_positions=integer(config, "max_position_embeddings"),
        eos_token_ids=_end_tokens(generation, config),
    )


def read_drafter(config: Mapping[str, Any]) -> DrafterConfig:
    """Read the `config.json` dict of a DFlash, Draft-OPD, DFlare, Domino, DSpark, xPress or DBLast drafter, whatever packaged it.

    What conversion found in the weights (`config["reanchor_jax"]`) wins over what the config says or leaves out.
    Raises ValueError for other architectures and for a missing block_size, mask_token_id or target_layer_ids
    (fallbacks are wrong for most published checkpoints).
    """
    flat = _flat(config)
    options = {**read_options(config), **_stored_options(config)}
    head, confidence = options.pop("head"), options.pop("confidence")
    is_gemma, is_speculators = _is_gemma(flat), _is_speculators(config)
    _check_present(flat, "block_size", "mask_token_id", "target_layer_ids", *(() if is_speculators else ("num_target_layers",)))
    num_slots = integer(flat, "block_size", most=_MOST_SLOTS)
    num_drafts = options.pop("num_drafts")
    causal = boolean(flat, "is_causal", boolean(flat, "causal", boolean(flat, "dflash_query_causal", None)))
    causal = False if boolean(flat, "sliding_window_non_causal", False) else causal
    # layer_types alone says which layers slide, whatever use_sliding_window says; without it, transformers' rule by layer number
    is_windowed = boolean(flat, "use_sliding_window", False) or strings(flat, "layer_types", None) is not None
    layers = _gemma_layers(flat) if is_gemma else _layers(flat, is_windowed=is_windowed)
    family: Family = "gemma4" if is_gemma else "qwen3"
    own_scale = math.sqrt(integer(flat, "hidden_size")) if is_gemma else None
    return DrafterConfig(
        family=family,
        **_widths(flat),
        # without is_causal, sliding layers are causal inside the block and full layers are not
        layers=tuple(replace(layer, is_causal=layer.window is not None if causal is None else causal) for layer in layers),
        num_slots=num_slots,
        num_drafts=num_slots - (0 if options["is_shifted"] else 1) if num_drafts is None else num_drafts,
        mask_token_id=integer(flat, "mask_token_id", least=None),
        target_layer_ids=tuple(integers(flat, "target_layer_ids")),
        num_target_layers=None if is_speculators else integer(flat, "num_target_layers", most=MOST_LAYERS),
        head=None if head is None else HeadConfig(**head),
        confidence=None if confidence is None else ConfidenceConfig(**{**confidence, "temperatures": tuple(confidence["temperatures"])}),
        mixture=_mixture(flat),
        embedding_scale=number(flat, "input_embedding_scale", own_scale),
        output_multiplier=number(flat, "output_multiplier", 1.0),
        softcap=number(flat, "final_logit_softcapping", None, or_zero=True),
        **options,
    )


def read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a drafter's config says about fusion, alignment, head and ownership, as keyword arguments of DrafterConfig (JSON values)."""
    _refuse_known(config)
    flat = _flat(config)
    _check_neutral(flat, tuple(_NEUTRAL))
    _check_activation(flat, "gelu_pytorch_tanh" if _is_gemma(flat) else "silu")
    architectures = strings(flat, "architectures", [])
    is_speculators = _is_speculators(config)
    if not is_speculators and not any(name in _DRAFTERS for name in architectures):
        raise ValueError(f"architectures {architectures} is not a supported drafter; supported are {', '.join(_DRAFTERS)}.")
    projector = string(flat, "projector_type", "")
    projector = "domino" if projector == "causal_v5" else projector
    is_domino = projector == "domino" or "DominoDraftModel" in architectures
    is_dspark = (
        projector == "dspark"
        or any("DSpark" in name for name in architectures)
        or "dspark" in (string(flat, "model_type", ""), string(config, "speculators_model_type", ""))
    )
    is_dflare = any(name in _DFLARE for name in architectures) or "dflare" in (string(flat, "model_arch", ""), projector)
    head = confidence = None
    if is_domino:
        _check_present(flat, "gru_hidden_dim", "emb_dim")
        plain = integer(flat, "pure_draft_prefix_len", 0, least=0)
        head = HeadConfig(kind="gru", size=integer(flat, "gru_hidden_dim"), inner_size=integer(flat, "emb_dim"), num_plain=plain)
    elif is_dspark and (rank := integer(flat, "markov_rank", 0, least=0)):
        kind = string(flat, "markov_head_type", "vanilla")
        if kind not in _MARKOV_KINDS:
            raise ValueError(f"markov_head_type {kind!r} is not supported; known are {', '.join(_MARKOV_KINDS)}.")
        head = HeadConfig(kind=_MARKOV_KINDS[kind], size=rank)
    elif projector == "xpress":
        _check_present(flat, "refiner_rank", "refiner_width")
        sizes = {"size": integer(flat, "refiner_rank"), "inner_size": integer(flat, "refiner_width")}
        head = HeadConfig(kind="refiner", **sizes, num_passes=integer(flat, "refiner_passes", _REFINER_PASSES))
    is_used = boolean(flat, "use_confidence_head", False)
    if is_dspark and (boolean(flat, "enable_confidence_head", False) or is_used):
        reads = boolean(flat, "confidence_head_with_markov", is_used) and head is not None
        confidence = ConfidenceConfig(reads_previous=reads, temperatures=tuple(numbers(flat, "confidence_temperatures", ())))
    integer(config, "hidden_size", None)  # conversion compares tensors with it
    draft_vocab_size = integer(flat, "draft_vocab_size", None)
    owns = any(name in _DEEPSPEC for name in architectures) or is_speculators
    return {
        "is_shifted": _is_shifted(flat, is_dspark=is_dspark, is_domino=is_domino, is_speculators=is_speculators),
        "fusion": "per_layer" if is_dflare else "concatenated",
        "head": None if head is None else asdict(head),
        "confidence": None if confidence is None else {**asdict(confidence), "temperatures": list(confidence.temperatures)},
        "has_embedding": owns,
        "has_head": owns,
        "draft_vocab_size": None if draft_vocab_size == integer(flat, "vocab_size", None) else draft_vocab_size,
        "num_drafts": integer(flat, "num_drafts", None),
    }


def _mixture(flat: Mapping[str, Any]) -> MixtureConfig | None:
    """DBLast's mixture, which a drafter of any head may have; ours alone, so that no conversion finds one."""
    if string(flat, "projector_type", "") != "dblast" and "mixture_rank" not in flat:
        return None
    _check_present(flat, "mixture_rank", "mixture_components")
    return MixtureConfig(num_components=integer(flat, "mixture_components"), size=integer(flat, "mixture_rank"))


def states_alignment(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's config says which position a slot predicts, rather than leaving it to its family."""
    flat = _flat(config)
    return any(boolean(flat, name, None) is not None for name in _ALIGNMENT)


def _stored_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What conversion stored under OPTIONS, in the form and with the types of `read_options`."""
    try:
        given = section(config, OPTIONS, {})
        _check_known(OPTIONS, given, _STORED)
        head, confidence = section(given, "head", None), section(given, "confidence", None)
        if head is not None:
            _check_known("head", head, (*_HEAD, "num_passes"), needed=_HEAD)
            sizes = {name: integer(head, name, least=least) for name, least in (("size", 1), ("inner_size", 0), ("num_plain", 0))}
            head = {"kind": _choice(head, "kind", get_args(HeadKind)), **sizes, "num_passes": integer(head, "num_passes", 0, least=0)}
        if confidence is not None:
            _check_known("confidence", confidence, _CONFIDENCE, needed=_CONFIDENCE)
            switches = {name: boolean(confidence, name) for name in ("reads_previous", "has_bias")}
            confidence = {**switches, "temperatures": numbers(confidence, "temperatures")}
        values = {"head": head, "confidence": confidence}
        values |= {name: integer(given, name, None) for name in ("draft_vocab_size", "num_drafts")}
        values |= {name: boolean(given, name) for name in ("is_shifted", "has_embedding", "has_head") if name in given}
        values |= {"fusion": _choice(given, "fusion", get_args(Fusion))} if "fusion" in given else {}
    except ValueError as error:
        rule = str(error).removesuffix("; fix config.json.")
        raise ValueError(f"the section {OPTIONS!r} of drafter_config.json was edited: {rule}; convert the drafter again.") from error
    return {name: value for name, value in values.items() if name in given}


def _check_known(name: str, given: Mapping[str, Any], known: Sequence[str], *, needed: Sequence[str] = ()) -> None:
    if unknown := sorted(map(str, given.keys() - set(known))):
        raise ValueError(f"{name} holds {', '.join(unknown)}, known are {', '.join(known)}; fix config.json.")
    if missing := [field for field in needed if given.get(field) is None]:
        raise ValueError(f"{name} lacks {', '.join(missing)}; fix config.json.")


def _choice(given: Mapping[str, Any], name: str, known: Sequence[str]) -> str:
    value = string(given, name)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}; fix config.json.")
    return value


def _is_shifted(flat: Mapping[str, Any], *, is_dspark: bool, is_domino: bool, is_speculators: bool) -> bool:
    """Whether slot k predicts the token after its own position. A wrong answer crashes nothing and costs most of the acceptance."""
    for name in _ALIGNMENT:
        if (stated := boolean(flat, name, None)) is not None:
            return stated
    if is_domino or "model_arch" in flat or "target_num_hidden_layers" in flat:  # AngelSpec trains DSpark unshifted
        return False
    if is_speculators:
        methods = sections(section(flat, "speculators_config", {}), "proposal_methods", []) or [{}]
        return integer(methods[0], "speculative_tokens", None) == integer(flat, "block_size", None, most=_MOST_SLOTS)
    return is_dspark


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level of fields whatever the packaging: `dflash_config` wins over the top level; speculators' backbone has a dict of its own."""
    nested = section(config, "transformer_layer_config", {})
    hidden = ("transformer_layer_config", "model_type") if nested else ()
    own = {name: value for name, value in config.items() if name not in hidden}
    layers = (nested, own, section(config, "dflash_config", {}))
    flat = {name: value for layer in layers for name, value in layer.items() if value is not None}
    if nested and "target_layer_ids" not in flat and "aux_hidden_state_layer_ids" in flat:
        flat["target_layer_ids"] = [index - 1 for index in integers(flat, "aux_hidden_state_layer_ids")]  # counted from the embedding there
    if "target_num_hidden_layers" in flat:  # AngelSpec counts taps in num_target_layers
        flat["num_target_layers"] = flat["target_num_hidden_layers"]
    return flat


def _refuse_known(config: Mapping[str, Any]) -> None:
    """Name what is recognised but not implemented, and say what to use instead."""
    told = [string(config, name, "") for name in ("model_type", "speculators_model_type", "model_arch")]
    words = [word.lower().replace("_", "").replace("-", "") for word in (*strings(config, "architectures", []), *told)]
    if "dspark_block_size" in config:
        words.append("deepseekv4")
    nested = section(config, "dflash_config", {})
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


def _gemma_target(text: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> TargetConfig:
    for name in ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "attention_bias"):
        if text.get(name):
            raise ValueError(f"{name}={text[name]} is not supported; only Gemma-4 models without it are (the 12B).")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ValueError(f"use_bidirectional_attention={text['use_bidirectional_attention']!r} is not supported; a target must be causal.")
    _check_activation(text, "gelu_pytorch_tanh")
    return TargetConfig(
        family="gemma4",
        **_widths(text),
        layers=_gemma_layers(text),
        is_tied=boolean(text, "tie_word_embeddings", True),
        max_positions=integer(text, "max_position_embeddings"),
        eos_token_ids=eos_token_ids,
        embedding_scale=math.sqrt(integer(text, "hidden_size")),
        softcap=number(text, "final_logit_softcapping", None, or_zero=True) or None,
    )


def _gemma_layers(text: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    """Layers of two kinds; sizes of the full ones from `per_layer_config` (transformers >= 5.15) or `global_head_dim` (hub)."""
    kinds = _layer_kinds(text)
    overrides = {f"per_layer_config[{key}]": value for key, value in section(text, "per_layer_config", {}).items()}
    names = [f"per_layer_config[{index}]" for index in range(len(kinds))]
    if unknown := sorted(overrides.keys() - set(names)):
        raise ValueError(f"{', '.join(unknown)} is for no layer, layers are 0..{len(kinds) - 1}; fix config.json.")
    shares_value = boolean(text, "attention_k_eq_v", False)
    layers = []
    for name, kind in zip(names, kinds, strict=True):
        is_full = kind == "full_attention"
        own = section(overrides, name) if name in overrides else {}
        _check_known(name, own, ("head_dim", "num_key_value_heads"))
        heads, size = integer(text, "num_key_value_heads"), integer(text, "head_dim")
        if is_full and not overrides:
            size = integer(text, "global_head_dim")
            heads = integer(text, "num_global_key_value_heads", heads) if shares_value else heads
        layers.append(
            LayerConfig(
                num_kv_heads=integer(own, "num_key_value_heads", heads),
                head_size=integer(own, "head_dim", size),
                rope=read_rope(text, kind),
                window=None if is_full else integer(text, "sliding_window"),
                has_value=not (is_full and shares_value),
            )
        )
    return tuple(layers)


def _layers(config: Mapping[str, Any], *, is_windowed: bool) -> tuple[LayerConfig, ...]:
    """Layers of one shape; those of `layer_types` sliding_attention are windowed, if windows are used at all."""
    heads = integer(config, "num_attention_heads")
    shape = LayerConfig(
        num_kv_heads=integer(config, "num_key_value_heads", heads),
        head_size=integer(config, "head_dim", integer(config, "hidden_size") // heads),
        rope=read_rope(config),
    )
    window = integer(config, "sliding_window", None) if is_windowed else None
    # transformers' rule where layer_types is absent: layers from max_window_layers (default 28) on slide, if windows are used at all
    first = MOST_LAYERS if window is None else integer(config, "max_window_layers", 28, least=0)
    num_layers = integer(config, "num_hidden_layers", most=MOST_LAYERS)
    kinds = _layer_kinds(config, ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)])
    if is_windowed and "sliding_attention" in kinds and window is None:
        raise ValueError("layer_types names a sliding_attention layer but sliding_window is missing; add it to config.json.")
    return tuple(replace(shape, window=window if kind == "sliding_attention" else None) for kind in kinds)


def _layer_kinds(config: Mapping[str, Any], default: Sequence[str] | None = None) -> Sequence[str]:
    num_layers = integer(config, "num_hidden_layers", most=MOST_LAYERS)
    kinds = strings(config, "layer_types") if default is None else strings(config, "layer_types", default)
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers; fix config.json.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; known are full_attention and sliding_attention.")
    return kinds


def read_rope(config: Mapping[str, Any], layer_kind: str | None = None) -> RopeConfig:
    """Read `rope_parameters` (transformers 5; Gemma-4 has one for each kind of layer) or `rope_theta` with `rope_scaling` (older)."""
    scaling = section(config, "rope_parameters", {}) or section(config, "rope_scaling", {})
    if layer_kind is not None:
        if layer_kind not in scaling:
            raise ValueError(
                f"rope_parameters lacks an entry for {layer_kind}; Gemma-4 needs one, with its rope_theta, for every kind used."
            )
        scaling = section(scaling, layer_kind)
    elif "full_attention" in scaling or "sliding_attention" in scaling:
        raise ValueError("rope_parameters for each kind of layer are supported in Gemma-4 models only, and need one for every kind used.")
    theta = number(scaling, "rope_theta", None if layer_kind is not None else number(config, "rope_theta", None, above=1), above=1)
    if theta is None:
        raise ValueError(
            "rope_theta is missing from the config (neither at the top level nor in rope_parameters); "
            "guessing 10000 would be silently wrong, so add it to config.json."
        )
    kind = string(scaling, "rope_type", string(scaling, "type", "default"))
    rate = number(scaling, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0, most=1), most=1)
    if integer(scaling, "rope_dim", None) not in (None, config.get("head_dim")):
        raise ValueError(f"rope_dim {scaling['rope_dim']} is not supported; only the whole head ({config.get('head_dim')}) is rotated.")
    if kind == "proportional":
        return RopeConfig(theta=theta, kind="proportional", rotated_rate=rate)
    if rate != 1.0:
        raise ValueError(f"partial_rotary_factor {rate} is supported with rope_type proportional only; got {kind}.")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_type {kind!r} is not supported; known types are default, llama3, yarn, proportional.")
    factor = number(scaling, "factor")
    original = integer(scaling, "original_max_position_embeddings", None) or integer(config, "max_position_embeddings")
    if kind == "llama3":
        low = number(scaling, "low_freq_factor")
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=factor,
            low_frequency_factor=low,
            high_frequency_factor=number(scaling, "high_freq_factor", above=low),  # their difference divides
            original_max_positions=original,
        )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        attention_factor=number(scaling, "attention_factor", _yarn_attention_factor(scaling, factor)),
        is_truncated=boolean(scaling, "truncate", True),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Magnitude correction of YaRN: 0.1 ln(factor) + 1, or the ratio of two such where the config states scales."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, whole = (number(scaling, name, 0.0, or_zero=True) for name in ("mscale", "mscale_all_dim"))
    return magnitude(scale) / magnitude(whole) if scale and whole else magnitude(1.0)


def _widths(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": "vocab_size", "width": "hidden_size", "num_heads": "num_attention_heads", "mlp_width": "intermediate_size"}
    return {**{ours: integer(config, name) for ours, name in sizes.items()}, "norm_epsilon": number(config, "rms_norm_eps")}


def _is_gemma(flat: Mapping[str, Any]) -> bool:
    return "Gemma4DSparkModel" in strings(flat, "architectures", [])


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return bool(section(config, "transformer_layer_config", {}))


def _end_tokens(generation_config: Mapping[str, Any], *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The first eos_token_id stated, an integer or a list of them."""
    for file, config in (("generation_config.json", generation_config), *(("config.json", config) for config in configs)):
        found = config.get("eos_token_id")
        if found is None:
            continue
        ids = found if isinstance(found, list | tuple) else [found]
        if not all(map(is_integer, ids)):
            raise ValueError(f"eos_token_id must be an integer or a list of integers; got {reprlib.repr(found)}; fix {file}.")
        return tuple(ids)
    return ()


def _check_present(flat: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if flat.get(name) is None:
            raise ValueError(f"{name} is missing from the drafter config (looked in dflash_config and at the top level); add it.")


def _check_activation(config: Mapping[str, Any], wanted: str) -> None:
    found = string(config, "hidden_activation", string(config, "hidden_act", wanted))
    if found != wanted:
        raise ValueError(f"hidden_act {found!r} is not supported; only {wanted} is.")


def _check_neutral(config: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        neutral = _NEUTRAL.get(name, False)
        value = config.get(name)
        if value is not None and value != neutral:
            raise ValueError(f"{name}={value} is not supported; only checkpoints without it are.")
