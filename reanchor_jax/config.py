"""Describe models and decoding by frozen records, read from Hugging Face `config.json` dicts.

In: the dict of a `config.json`, or keyword arguments.
Out: TargetConfig, DrafterConfig, DecodeConfig; every rule about their values is checked here, before any tracing.
Source: transformers' Llama and Qwen3 configs; z-lab DFlash configs, old layout (top level) and new (`dflash_config`, `rope_parameters`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

RopeKind = Literal["default", "llama3", "yarn"]
RetainPolicy = Literal["none", "baseline", "deepest", "both"]
DraftChoice = Literal["argmax", "independent", "coupled"]

RETAIN_POLICIES: tuple[RetainPolicy, ...] = get_args(RetainPolicy)
DRAFT_CHOICES: tuple[DraftChoice, ...] = get_args(DraftChoice)
CACHE_CHUNK = 64  # slots a plain-XLA attention step reads at once; cache buffers are a multiple of it


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/A), optionally rescaled.

    factor, low_frequency_factor, high_frequency_factor and original_max_positions belong to `llama3` and `yarn`;
    beta_fast and beta_slow (turns within the original context), is_truncated (round the ramp's ends to whole pairs) and
    attention_factor (scales cos and sin) to `yarn`. original_max_positions is in tokens.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    is_truncated: bool = True

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (older). Raise ValueError if theta is missing."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = scaling.get("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError(
                "rope_theta is missing from the config (neither at the top level nor in rope_parameters); "
                "guessing 10000 would be silently wrong, so add it to config.json."
            )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if scaling.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {scaling['partial_rotary_factor']} is not supported; only 1.0 is.")
        if kind == "default":
            return cls(theta=float(theta))
        if kind not in ("llama3", "yarn"):
            raise ValueError(f"rope_type {kind!r} is not supported; known types are default, llama3, yarn.")
        factor = float(_require(scaling, "factor"))
        original = int(scaling.get("original_max_position_embeddings") or _require(config, "max_position_embeddings"))
        if kind == "llama3":
            return cls(
                theta=float(theta),
                kind="llama3",
                factor=factor,
                low_frequency_factor=float(_require(scaling, "low_freq_factor")),
                high_frequency_factor=float(_require(scaling, "high_freq_factor")),
                original_max_positions=original,
            )
        return cls(
            theta=float(theta),
            kind="yarn",
            factor=factor,
            original_max_positions=original,
            beta_fast=float(scaling.get("beta_fast") or 32.0),
            beta_slow=float(scaling.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(scaling, factor),
            is_truncated=bool(scaling.get("truncate", True)),
        )


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape and mask of one decoder layer. Layers of one model may differ in all of it.

    window: keys with position > query position - window are visible; None means no limit.
    is_causal: whether a drafter block slot sees later slots of its own block (False) or not. Always True in a target.
    """

    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    window: int | None = None
    is_causal: bool = True


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape of a Llama-3.x or Qwen3 decoder.

    num_heads: query heads. mlp_width: of the gated MLP. layers: one record a decoder layer.
    has_qk_norm: whether queries and keys are normalised per head. is_tied: whether the head is the embedding.
    max_positions: positions the model was made for, in tokens. eos_token_ids: ids that end a generation by default.
    """

    family: Literal["llama", "qwen3"]
    vocab_size: int
    width: int
    num_heads: int
    mlp_width: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    has_qk_norm: bool
    is_tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        _check_heads(self.num_heads, self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> "TargetConfig":
        """Read a `config.json` dict of model_type llama or qwen3.

        generation_config: the dict of `generation_config.json`; its `eos_token_id` (an int or a list) wins over the model config's.
        Raises ValueError naming the field for anything the model code does not implement.
        """
        family = config.get("model_type")
        if family not in ("llama", "qwen3"):
            raise ValueError(f"model_type {family!r} is not a supported target; supported are llama and qwen3.")
        _refuse(config, "attention_bias", "mlp_bias")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is.")
        heads = _require(config, "num_attention_heads")
        rope = RopeConfig.from_huggingface(config)
        shape = LayerConfig(
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or _require(config, "hidden_size") // heads,
            rope=rope,
        )
        eos = (generation_config or {}).get("eos_token_id", config.get("eos_token_id"))
        return cls(
            family=family,
            vocab_size=_require(config, "vocab_size"),
            width=_require(config, "hidden_size"),
            num_heads=heads,
            mlp_width=_require(config, "intermediate_size"),
            norm_epsilon=_require(config, "rms_norm_eps"),
            layers=tuple(
                replace(shape, window=window)
                for window in _windows(config, is_used=family == "qwen3" and bool(config.get("use_sliding_window")))
            ),
            has_qk_norm=family == "qwen3",
            is_tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=_require(config, "max_position_embeddings"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,),
        )


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a DFlash block-diffusion drafter.

    block_size: anchor + drafted tokens (z-lab layout: slot k >= 1 predicts the token at its own position).
    target_layer_ids: 0-based target layers whose outputs are tapped, in the order `fc` expects them.
    num_target_layers: layers of the target it was trained for. vocab_size: of that target, whose embedding and head it borrows.
    mask_token_id: embedding row of the slots that are to be drafted.
    """

    vocab_size: int
    width: int
    num_heads: int
    mlp_width: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self):
        if self.block_size < 2:
            raise ValueError(f"block_size ({self.block_size}) must be at least 2: the anchor and one drafted token.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id ({self.mask_token_id}) must lie in 0..{self.vocab_size - 1} (an embedding row of the target); "
                "fix it in the drafter's config.json."
            )
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty; the drafter needs at least one tapped target layer.")
        for tap in self.target_layer_ids:
            if not 0 <= tap < self.num_target_layers:
                raise ValueError(
                    f"target_layer_ids holds {tap}, outside 0..{self.num_target_layers - 1}; ids are 0-based layer outputs of the target."
                )
        _check_heads(self.num_heads, self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> "DrafterConfig":
        """Read a z-lab DFlash `config.json` dict, old or new layout.

        Raises ValueError for another architecture and for a missing block_size, mask_token_id or target_layer_ids
        (the reference's fallbacks are wrong for most published checkpoints).
        """
        architectures = tuple(config.get("architectures") or ())
        if architectures != ("DFlashDraftModel",):
            raise ValueError(f"architectures {list(architectures)} is not a supported drafter; supported is ['DFlashDraftModel'].")
        _refuse(config, "attention_bias")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is.")
        nested = dict(config.get("dflash_config") or {})
        for name, neutral in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", None)):
            value = nested.get(name, config.get(name))
            if value not in (None, neutral, 0.0 if neutral is None else neutral):
                raise ValueError(f"{name} {value} is not supported yet; only checkpoints without it are.")

        def require(name: str) -> Any:
            value = nested.get(name, config.get(name))
            if value is None:
                raise ValueError(f"{name} is missing from the drafter config (looked in dflash_config and at the top level); add it.")
            return value

        heads = _require(config, "num_attention_heads")
        windows = _windows(config, is_used=config.get("layer_types") is not None)
        is_causal = config.get("is_causal")
        rope = RopeConfig.from_huggingface(config)
        shape = LayerConfig(
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or _require(config, "hidden_size") // heads,
            rope=rope,
        )
        return cls(
            vocab_size=_require(config, "vocab_size"),
            width=_require(config, "hidden_size"),
            num_heads=heads,
            mlp_width=_require(config, "intermediate_size"),
            norm_epsilon=_require(config, "rms_norm_eps"),
            # without a top-level is_causal, sliding layers are causal inside the block and full layers are not
            layers=tuple(
                replace(shape, window=window, is_causal=window is not None if is_causal is None else bool(is_causal)) for window in windows
            ),
            block_size=int(require("block_size")),
            mask_token_id=int(require("mask_token_id")),
            target_layer_ids=tuple(int(tap) for tap in require("target_layer_ids")),
            num_target_layers=int(require("num_target_layers")),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What a decoding round does; static under `jit`. Use a preset and override what you need.

    is_speculative: False means one target token a round and no drafter.
    retain: which rejected nodes' states condition shifted blocks in the next round.
    max_offsets: most shifted blocks a round drafts; 0 means as many as the policy can retain (see `resolve`).
    num_nodes: trie capacity, anchor included; 0 means the block size for the plain chain, else its square, at most 256.
    draft_choice: how draft tokens are picked from drafter logits at temperature > 0.
    cache_length: most tokens (prompt + generated) a row can hold.
    prefill_chunk: prompt tokens a prefill pass takes; a multiple of 64.
    block_buckets, node_buckets: numbers of blocks and nodes at which a round is compiled besides the full ones (1 + max_offsets blocks,
        num_nodes nodes); the smallest that fits all rows is picked on the device. Each costs compile time and saves work in small rounds.
    """

    is_speculative: bool = True
    retain: RetainPolicy = "none"
    max_offsets: int = 0
    num_nodes: int = 0
    draft_choice: DraftChoice = "argmax"
    cache_length: int = 1024
    prefill_chunk: int = 64
    block_buckets: tuple[int, ...] = (1, 4, 16)
    node_buckets: tuple[int, ...] = (16, 64)

    def __post_init__(self):
        if self.retain not in RETAIN_POLICIES:
            raise ValueError(f"retain must be one of {', '.join(RETAIN_POLICIES)}; got {self.retain!r}.")
        if self.draft_choice not in DRAFT_CHOICES:
            raise ValueError(f"draft_choice must be one of {', '.join(DRAFT_CHOICES)}; got {self.draft_choice!r}.")
        if self.max_offsets < 0:
            raise ValueError(f"max_offsets must be 0 or more; got {self.max_offsets}.")
        if self.max_offsets and self.retain == "none":
            raise ValueError(f"max_offsets ({self.max_offsets}) needs retained states; set retain to baseline, deepest or both.")
        if self.num_nodes < 0:
            raise ValueError(f"num_nodes must be 0 or more; got {self.num_nodes}.")
        if not self.is_speculative and (self.retain != "none" or self.num_nodes):
            raise ValueError("a config with is_speculative=False takes neither retain nor num_nodes; leave them out.")
        if self.cache_length < 1:
            raise ValueError(f"cache_length must be at least 1; got {self.cache_length}.")
        if self.prefill_chunk < 1 or self.prefill_chunk % CACHE_CHUNK:
            raise ValueError(f"prefill_chunk must be a positive multiple of {CACHE_CHUNK}; got {self.prefill_chunk}.")
        for name in ("block_buckets", "node_buckets"):
            buckets = getattr(self, name)
            if not isinstance(buckets, tuple) or (buckets and buckets[0] < 1) or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} must be a tuple of strictly rising positive numbers; got {buckets!r}.")

    @classmethod
    def autoregressive(cls, **overrides) -> "DecodeConfig":
        """One target token a round: the baseline every claim is measured against."""
        return cls(**{"is_speculative": False, **overrides})

    @classmethod
    def dflash(cls, **overrides) -> "DecodeConfig":
        """The drafter's own chain: one block a round, nothing retained."""
        return cls(**overrides)

    @classmethod
    def reanchor(cls, **overrides) -> "DecodeConfig":
        """The paper's ReAnchor: states of the rejected baseline are retained, and every one of them drafts a shifted block."""
        return cls(**{"retain": "baseline", **overrides})

    def resolve(self, block_size: int) -> "DecodeConfig":
        """Fill what depends on the drafter's block size B; a resolved config resolves to itself.

        A policy retains at most B-1 nodes (`baseline`), 2B-2 (`deepest`) or 3B-3 (`both`).
        Raises ValueError if num_nodes cannot hold the baseline block.
        """
        chains = {"none": 0, "baseline": 1, "deepest": 2, "both": 3}[self.retain]
        offsets = self.max_offsets or chains * (block_size - 1)
        nodes = self.num_nodes or (max(min(block_size**2, 256), block_size) if offsets else block_size)
        if nodes < block_size:
            raise ValueError(f"num_nodes ({nodes}) must hold the baseline block of {block_size} tokens; raise it to at least {block_size}.")
        return replace(
            self,
            max_offsets=offsets,
            num_nodes=nodes,
            block_buckets=_with_full(self.block_buckets, 1 + offsets),
            node_buckets=_with_full(self.node_buckets, nodes),
        )


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise ValueError if the drafter does not belong to the target: width, vocabulary, number of layers."""
    if drafter.width != target.width:
        raise ValueError(f"drafter width ({drafter.width}) differs from the target's ({target.width}); they do not belong together.")
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter vocab_size ({drafter.vocab_size}) differs from the target's ({target.vocab_size}); they do not belong together."
        )
    if drafter.num_target_layers != target.num_layers:
        raise ValueError(
            f"the drafter was made for a target of {drafter.num_target_layers} layers, this one has {target.num_layers}; "
            "they do not belong together."
        )


def _require(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ValueError(f"config.json lacks {name!r}; add it.")
    return config[name]


def _refuse(config: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if config.get(name):
            raise ValueError(f"{name}={config[name]} is not supported; only checkpoints without it are.")


def _windows(config: Mapping[str, Any], *, is_used: bool) -> tuple[int | None, ...]:
    """Window of each layer from `layer_types`; a sliding layer without `sliding_window` is an error."""
    num_layers = _require(config, "num_hidden_layers")
    # transformers' rule where layer_types is absent: layers from max_window_layers (default 28) on slide, if windows are used at all
    has_default = is_used and bool(config.get("sliding_window"))
    kinds = config.get("layer_types") or [
        "sliding_attention" if has_default and index >= config.get("max_window_layers", 28) else "full_attention"
        for index in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers; fix config.json.")
    windows = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer type {kind!r} is not supported; known are full_attention and sliding_attention.")
        is_sliding = kind == "sliding_attention" and is_used
        if is_sliding and not config.get("sliding_window"):
            raise ValueError("layer_types names a sliding_attention layer but sliding_window is missing; add it to config.json.")
        windows.append(int(config["sliding_window"]) if is_sliding else None)
    return tuple(windows)


def _check_heads(num_heads: int, layers: tuple[LayerConfig, ...]) -> None:
    for layer in layers:
        if num_heads % layer.num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({layer.num_kv_heads}); check config.json.")


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """Magnitude correction of YaRN: 0.1 ln(factor) + 1 unless the config states its own."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def _with_full(buckets: tuple[int, ...], full: int) -> tuple[int, ...]:
    return (*(size for size in buckets if size < full), full)
