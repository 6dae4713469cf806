"""Describe models by frozen records; every rule about their values is checked here, before any tracing.

In: keyword arguments; `huggingface` reads them from `config.json` dicts.
Out: TargetConfig, DrafterConfig.
Source: transformers' Llama, Qwen3 and Gemma-4 configs; the published configs of the DFlash family.
"""

import reprlib
from dataclasses import dataclass
from typing import Literal

from reanchor_jax.fields import is_integer, is_positive

RopeKind = Literal["default", "llama3", "yarn", "proportional"]
Family = Literal["llama", "qwen3", "gemma4"]
Fusion = Literal["concatenated", "per_layer"]
HeadKind = Literal["gru", "markov", "gated_markov", "rnn_markov", "refiner"]

CACHE_CHUNK = 64  # slots a plain-XLA attention step reads at once; cache buffers are a multiple of it


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: frequencies theta^(-2i/A), optionally rescaled.

    factor, low_frequency_factor, high_frequency_factor and original_max_positions belong to `llama3` and `yarn`;
    beta_fast and beta_slow (turns within the original context), is_truncated (round the ramp's ends to whole pairs) and
    attention_factor (scales cos and sin) to `yarn`. original_max_positions is in tokens.
    rotated_rate: fraction of the pairs that turn, belongs to `proportional`; the others have frequency 0.
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
    rotated_rate: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Shape and mask of one decoder layer. Layers of one model may differ in all of it.

    window: keys with position > query position - window are visible; None means no limit.
    is_causal: whether a drafter block slot sees later slots of its own block (False) or not. Always True in a target.
    has_value: whether values have a projection of their own; without one they are the keys before norm and rotary.
    """

    num_kv_heads: int
    head_size: int
    rope: RopeConfig
    window: int | None = None
    is_causal: bool = True
    has_value: bool = True


@dataclass(frozen=True, kw_only=True)
class StyleConfig:
    """How a decoder layer is wired: what families differ in beside shapes.

    has_qk_norm: queries and keys are normalised per head. has_value_norm: values too, without a weight.
    attention_scale: factor of the scores; None means A^-0.5.
    has_output_norms: outputs of attention and MLP are normalised before they join the stream.
    has_layer_scale: the stream is multiplied by a number of the layer's own at its end.
    activation: of the MLP's gate.
    is_norm_wide: RMSNorm multiplies by its weight in float32; otherwise after casting back.
    """

    has_qk_norm: bool = True
    has_value_norm: bool = False
    attention_scale: float | None = None
    has_output_norms: bool = False
    has_layer_scale: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    is_norm_wide: bool = False


STYLES: dict[Family, StyleConfig] = {
    "llama": StyleConfig(has_qk_norm=False),
    "qwen3": StyleConfig(),
    "gemma4": StyleConfig(
        has_value_norm=True,
        attention_scale=1.0,
        has_output_norms=True,
        has_layer_scale=True,
        activation="gelu_tanh",
        is_norm_wide=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Shape of a Llama-3.x, Qwen3 or Gemma-4 decoder.

    family: how its layers are wired (`STYLES`).
    num_heads: query heads. mlp_width: of the gated MLP. layers: one record a decoder layer.
    is_tied: whether the head is the embedding.
    max_positions: positions the model was made for, in tokens. eos_token_ids: ids that end a generation by default.
    embedding_scale: factor of embedded tokens. softcap: logits become softcap * tanh(logits / softcap); None leaves them.
    """

    family: Family
    vocab_size: int
    width: int
    num_heads: int
    mlp_width: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    is_tied: bool
    max_positions: int
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        _check_heads(self.num_heads, self.layers)
        for token in self.eos_token_ids:
            if not (is_integer(token) and 0 <= token < self.vocab_size):
                raise ValueError(
                    f"eos_token_id holds {reprlib.repr(token)}, no token of the vocabulary 0..{self.vocab_size - 1}; "
                    "fix generation_config.json, or config.json if that does not state it."
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shape of what makes a block's tokens depend on each other: an additive correction of the logits, by the tokens before.

    kind: `gru` (Domino) or one of DSpark's Markov heads, token by token; or `refiner` (xPress), all tokens of a block at once.
    size: width of its state or of its token embedding, rank of a refiner.
    inner_size: width inside Domino's output map or a refiner's MLPs; 0 in Markov heads.
    num_plain: first drafted tokens that are not corrected (Domino's pure_draft_prefix_len).
    num_passes: passes in which a refiner drafts a block; 0 in the others. As many as there are drafted tokens equal drafting in turn.
    """

    kind: HeadKind
    size: int
    inner_size: int = 0
    num_plain: int = 0
    num_passes: int = 0

    def __post_init__(self):
        if self.kind == "refiner" and (self.num_passes < 1 or self.inner_size < 1):
            raise ValueError(f"a refiner needs a pass and a width of at least 1; got {self.num_passes} passes, width {self.inner_size}.")
        if self.kind == "refiner" and self.num_plain:
            raise ValueError(f"a refiner corrects every drafted token; num_plain must be 0, got {self.num_plain}.")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """DBLast's latent mixture of block states: one component shifts all slots of a block.

    num_components: between which a block chooses. size: rank of the map that makes their shifts.
    """

    num_components: int
    size: int

    def __post_init__(self):
        if self.num_components < 2:
            raise ValueError(f"mixture_components must be at least 2; got {self.num_components}; leave mixture_rank out for none.")


@dataclass(frozen=True, kw_only=True)
class ConfidenceConfig:
    """DSpark's confidence head: log-odds that a drafted token is accepted if all before it are.

    reads_previous: whether it sees the Markov embedding of the token before. has_bias: whether its map has one.
    temperatures: divisor of the log-odds of each drafted token, from calibration; empty means 1.
    """

    reads_previous: bool = True
    has_bias: bool = True
    temperatures: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of a block-diffusion drafter of the DFlash family; fusion, alignment, head and ownership are independent.

    family: how its layers are wired (`STYLES`). vocab_size: of the target.
    num_slots: slots of a drafting pass, the anchor's included. num_drafts: tokens it drafts.
    is_shifted: slot k predicts the token after its own position (DSpark, Domino), instead of the one at it (DFlash).
    target_layer_ids: 0-based target layers whose outputs are tapped, in the order the fusion expects them.
    num_target_layers: layers of the target it was trained for; None if its config does not say (speculators).
    mask_token_id: embedding row of the slots that are to be drafted.
    fusion: `concatenated` (one linear map and norm for all layers) or `per_layer` (DFlare: a mixture of taps for each drafter layer, and
        projections of their own for context keys and values).
    head, confidence, mixture: None if it has none.
    has_embedding, has_head: whether it owns an embedding and a head; it borrows the target's otherwise.
    draft_vocab_size: tokens its own head knows, mapped to the target's by a table; None means all.
    embedding_scale: factor of embedded tokens; None means as the target scales its own.
    output_multiplier: factor of the logits. softcap: as in TargetConfig; None means as the target's, 0 none.
    """

    family: Family = "qwen3"
    vocab_size: int
    width: int
    num_heads: int
    mlp_width: int
    norm_epsilon: float
    layers: tuple[LayerConfig, ...]
    num_slots: int
    num_drafts: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    is_shifted: bool = False
    fusion: Fusion = "concatenated"
    head: HeadConfig | None = None
    confidence: ConfidenceConfig | None = None
    mixture: MixtureConfig | None = None
    has_embedding: bool = False
    has_head: bool = False
    draft_vocab_size: int | None = None
    embedding_scale: float | None = None
    output_multiplier: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        first = 0 if self.is_shifted else 1
        if self.num_slots < 2:
            raise ValueError(f"block_size ({self.num_slots}) must be at least 2: the anchor and one drafted token.")
        if not 1 <= self.num_drafts <= self.num_slots - first:
            raise ValueError(f"num_drafts ({self.num_drafts}) must lie in 1..{self.num_slots - first} for {self.num_slots} slots.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id ({self.mask_token_id}) must lie in 0..{self.vocab_size - 1} (an embedding row of the target); "
                "fix it in the drafter's config.json."
            )
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids is empty; the drafter needs at least one tapped target layer.")
        for tap in self.target_layer_ids:
            if tap < -1 or (self.num_target_layers is not None and tap >= self.num_target_layers):
                last = "" if self.num_target_layers is None else self.num_target_layers - 1
                raise ValueError(
                    f"target_layer_ids holds {tap}, outside 0..{last}; ids are 0-based layer outputs of the target, -1 is its embedding."
                )
        if len(set(self.target_layer_ids)) < len(self.target_layer_ids):
            raise ValueError(f"target_layer_ids holds a layer twice ({list(self.target_layer_ids)}); fix the drafter's config.json.")
        if self.draft_vocab_size is not None and not self.has_head:
            raise ValueError(f"draft_vocab_size ({self.draft_vocab_size}) needs a head of the drafter's own (lm_head).")
        if self.confidence is not None and self.confidence.reads_previous and (self.head is None or self.head.kind in ("gru", "refiner")):
            raise ValueError("confidence_head_with_markov needs a Markov head; the checkpoint has none.")
        if self.confidence is not None and self.confidence.temperatures:
            temperatures = self.confidence.temperatures
            if len(temperatures) != self.num_drafts or not all(map(is_positive, temperatures)):
                raise ValueError(
                    f"confidence_temperatures must be {self.num_drafts} positive finite numbers, one a drafted token; got {temperatures}."
                )
        _check_heads(self.num_heads, self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def block_size(self) -> int:
        """Tokens of a block: the anchor and what is drafted."""
        return 1 + self.num_drafts

    @property
    def feature_width(self) -> int:
        """Width of a context feature: one vector, or one for each layer."""
        return self.width * (self.num_layers if self.fusion == "per_layer" else 1)


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raise ValueError if the drafter does not belong to the target: width, vocabulary, number of layers."""
    if drafter.width != target.width:
        raise ValueError(f"drafter width ({drafter.width}) differs from the target's ({target.width}); they do not belong together.")
    if drafter.vocab_size != target.vocab_size:
        raise ValueError(
            f"drafter vocab_size ({drafter.vocab_size}) differs from the target's ({target.vocab_size}); they do not belong together."
        )
    if max(drafter.target_layer_ids) >= target.num_layers:
        raise ValueError(
            f"the drafter taps target layer {max(drafter.target_layer_ids)}, this target has {target.num_layers}; "
            "they do not belong together."
        )
    if drafter.num_target_layers not in (None, target.num_layers):
        raise ValueError(
            f"the drafter was made for a target of {drafter.num_target_layers} layers, this one has {target.num_layers}; "
            "they do not belong together."
        )


def _check_heads(num_heads: int, layers: tuple[LayerConfig, ...]) -> None:
    for layer in layers:
        if layer.head_size < 2 or layer.head_size % 2:
            raise ValueError(f"head_dim ({layer.head_size}) must be positive and even, rotary turns pairs; check config.json.")
        if num_heads % layer.num_kv_heads:
            raise ValueError(f"num_heads ({num_heads}) must be a multiple of num_kv_heads ({layer.num_kv_heads}); check config.json.")
