"""Describe models and decoding by frozen records; every rule about their values is checked here, before any tracing.

In: keyword arguments; `huggingface` reads them from `config.json` dicts.
Out: TargetConfig, DrafterConfig, DecodeConfig.
Source: transformers' Llama, Qwen3 and Gemma-4 configs; the published configs of the DFlash family.
"""

import reprlib
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from reanchor_jax.fields import is_integer, is_number, is_positive

RopeKind = Literal["default", "llama3", "yarn", "proportional"]
Family = Literal["llama", "qwen3", "gemma4"]
Fusion = Literal["concatenated", "per_layer"]
HeadKind = Literal["gru", "markov", "gated_markov", "rnn_markov"]
RetainPolicy = Literal["none", "baseline", "suffix", "deepest", "both", "descendants"]
AttachRule = Literal["earliest", "longest_prefix", "random", "original_offset", "original_offset_match"]
Extent = Literal["both", "in_block", "extension"]
Expand = Literal["none", "marginal", "merge"]
DraftChoice = Literal["argmax", "independent", "coupled"]

ATTACH_RULES: tuple[AttachRule, ...] = get_args(AttachRule)
EXTENTS: tuple[Extent, ...] = get_args(Extent)
EXPANSIONS: tuple[Expand, ...] = get_args(Expand)
RETAIN_POLICIES: tuple[RetainPolicy, ...] = get_args(RetainPolicy)
DRAFT_CHOICES: tuple[DraftChoice, ...] = get_args(DraftChoice)
_MOST_NODES = 4096
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
    """Shape of what makes a block's tokens depend on each other: an additive correction of the logits, drafted token by token.

    kind: `gru` (Domino) or one of DSpark's Markov heads. size: width of its state or of its token embedding.
    inner_size: width inside Domino's output map; 0 in Markov heads.
    num_plain: first drafted tokens that are not corrected (Domino's pure_draft_prefix_len).
    """

    kind: HeadKind
    size: int
    inner_size: int = 0
    num_plain: int = 0


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
    head, confidence: None if it has none.
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
        if self.confidence is not None and self.confidence.reads_previous and (self.head is None or self.head.kind == "gru"):
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


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """What a decoding round does; static under `jit`. Use a preset and override what you need.

    is_speculative: False means one target token a round and no drafter.
    retain: which rejected nodes' states condition shifted blocks in the next round.
    attach: where a shifted block joins the baseline: at the earliest token equal to its anchor (the paper's), at the one whose continuation
        agrees longest, at a random one, or at its own offset, whether or not the tokens match there.
    is_second_tried: a block whose anchor the baseline does not hold joins where it is the baseline's second choice.
    extent: what of shifted blocks is kept: `in_block` drops nodes beyond the baseline's end, `extension` all others.
    expand: which candidates are verified: `none` takes each block's own tokens; `marginal` the likeliest prefixes under the baseline's
        distributions (DDTree), `merge` those of the baseline and of all shifted blocks in one order.
    reliability: what a prefix that goes over to a shifted block is worth beside one that goes on in the baseline, from 0 (never) to 1.
    num_ranks: tokens of each slot that `expand` looks at; 0 means 16, or the vocabulary if that is smaller.
    max_offsets: most shifted blocks a round drafts; 0 means as many as the policy can retain (see `resolve`).
    num_nodes: trie capacity, anchor included; 0 means the block size for the plain chain, 64 with `expand`, else the square of the block
        size, at most 256.
    draft_choice: how draft tokens are picked from drafter logits at temperature > 0: `coupled` draws them with the noise with which the
        target will draw at their place, `independent` with their own (the paper's), `argmax` takes the likeliest.
    min_confidence: blocks are cut before the first token that a drafter with a confidence head trusts less; 0 cuts nothing.
    steps_per_second: target passes per second with 1, 2, ... tokens (`schedule.read_cost_table`): blocks are cut where verifying more
        costs more than it is expected to bring; empty cuts nothing.
    has_trace: the StepInfo of every round holds what was proposed and what the target said to each node (`statistics.Trace`).
    cache_length: most tokens (prompt + generated) a row can hold.
    prefill_chunk: prompt tokens a prefill pass takes; a multiple of 64.
    block_buckets, node_buckets: numbers of blocks and nodes at which a round is compiled besides the full ones (1 + max_offsets blocks,
        num_nodes nodes); the smallest that fits all rows is picked on the device. Each costs compile time and saves work in small rounds.
    """

    is_speculative: bool = True
    retain: RetainPolicy = "none"
    attach: AttachRule = "earliest"
    is_second_tried: bool = False
    extent: Extent = "both"
    expand: Expand = "none"
    reliability: float = 1.0
    num_ranks: int = 0
    max_offsets: int = 0
    num_nodes: int = 0
    draft_choice: DraftChoice = "coupled"
    min_confidence: float = 0.0
    steps_per_second: tuple[float, ...] = ()
    has_trace: bool = False
    cache_length: int = 1024
    prefill_chunk: int = 64
    block_buckets: tuple[int, ...] = (1, 4, 16)
    node_buckets: tuple[int, ...] = (16, 64, 128)

    def __post_init__(self):
        choices = {
            "retain": RETAIN_POLICIES,
            "attach": ATTACH_RULES,
            "extent": EXTENTS,
            "expand": EXPANSIONS,
            "draft_choice": DRAFT_CHOICES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}.")
        for name in ("is_speculative", "is_second_tried", "has_trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        for name in ("num_ranks", "max_offsets", "num_nodes", "cache_length", "prefill_chunk"):
            value = getattr(self, name)
            if isinstance(value, np.integer):  # `lengths.max() + 100` is one
                object.__setattr__(self, name, int(value))
            elif not is_integer(value):
                raise ValueError(f"{name} must be an integer; got {value!r}.")
        if self.is_second_tried and self.attach.startswith("original_offset"):
            raise ValueError(f"is_second_tried needs a rule that looks for tokens; attach={self.attach!r} places blocks by their offset.")
        if self.max_offsets < 0:
            raise ValueError(f"max_offsets must be 0 or more; got {self.max_offsets}.")
        if self.max_offsets and self.retain == "none":
            raise ValueError(
                f"max_offsets ({self.max_offsets}) needs retained states; set retain to one of {', '.join(RETAIN_POLICIES[1:])}."
            )
        self._check_expand()
        if not 0 <= self.num_nodes <= _MOST_NODES:
            raise ValueError(f"num_nodes must lie in 0..{_MOST_NODES}, its masks are square; got {reprlib.repr(self.num_nodes)}.")
        if not self.is_speculative and (self.retain != "none" or self.num_nodes):
            raise ValueError("a config with is_speculative=False takes neither retain nor num_nodes; leave them out.")
        if not (is_number(self.min_confidence) and 0 <= self.min_confidence < 1):
            raise ValueError(f"min_confidence must lie in [0, 1); got {self.min_confidence!r}.")
        if not isinstance(self.steps_per_second, tuple) or not all(map(is_positive, self.steps_per_second)):
            raise ValueError(f"steps_per_second must be a tuple of positive numbers, all finite; got {self.steps_per_second!r}.")
        if self.is_cut and (self.is_second_tried or self.attach == "original_offset"):
            raise ValueError(
                "min_confidence and steps_per_second value a shifted block by the baseline token at its site, which these blocks "
                "replace; leave out is_second_tried and attach='original_offset', or the cut."
            )
        if self.min_confidence and self.steps_per_second:
            raise ValueError("min_confidence and steps_per_second both cut blocks; set one of them.")
        if not self.is_speculative and (self.min_confidence or self.steps_per_second):
            raise ValueError("a config with is_speculative=False drafts nothing to cut; leave out min_confidence and steps_per_second.")
        if not self.is_speculative and self.has_trace:
            raise ValueError("a config with is_speculative=False proposes nothing to trace; leave out has_trace.")
        if self.cache_length < 1:
            raise ValueError(f"cache_length must be at least 1; got {self.cache_length}.")
        if self.prefill_chunk < 1 or self.prefill_chunk % CACHE_CHUNK:
            raise ValueError(f"prefill_chunk must be a positive multiple of {CACHE_CHUNK}; got {self.prefill_chunk}.")
        for name in ("block_buckets", "node_buckets"):
            buckets = getattr(self, name)
            is_typed = isinstance(buckets, tuple) and all(map(is_integer, buckets))
            if not is_typed or (buckets and buckets[0] < 1) or list(buckets) != sorted(set(buckets)):
                raise ValueError(f"{name} must be a tuple of strictly rising positive integers; got {buckets!r}.")

    def _check_expand(self) -> None:
        if self.num_ranks < 0:
            raise ValueError(f"num_ranks must be 0 or more; got {self.num_ranks}.")
        if not (is_number(self.reliability) and 0 <= self.reliability <= 1):
            raise ValueError(f"reliability must lie in [0, 1]; got {self.reliability!r}.")
        if self.expand == "none" and self.num_ranks:
            raise ValueError(f"num_ranks ({self.num_ranks}) belongs to trees; set expand to marginal or merge, or leave it out.")
        if self.expand != "merge" and self.reliability != 1:
            raise ValueError(f"reliability ({self.reliability}) belongs to expand='merge'; set that, or leave it out.")
        if self.expand == "none":
            return
        if not self.is_speculative:
            raise ValueError(f"expand={self.expand!r} needs drafts; leave it out of a config with is_speculative=False.")
        if self.expand == "marginal" and self.retain != "none":
            raise ValueError(f"expand='marginal' drafts no shifted blocks, so retain={self.retain!r} has no use; take expand='merge'.")
        if self.expand == "merge" and self.retain == "none":
            raise ValueError(f"expand='merge' needs retained states; set retain to one of {', '.join(RETAIN_POLICIES[1:])}.")
        if self.attach != "earliest" or self.is_second_tried or self.extent != "both":
            raise ValueError(
                f"expand={self.expand!r} attaches blocks at every prefix that holds their anchor token; leave out attach, is_second_tried "
                "and extent."
            )
        if self.is_cut:
            raise ValueError(f"expand={self.expand!r} takes a number of nodes; leave out min_confidence and steps_per_second.")

    @property
    def is_cut(self) -> bool:
        """Whether blocks are cut by the drafter's confidence."""
        return self.min_confidence > 0 or bool(self.steps_per_second)

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

    @classmethod
    def ddtree(cls, num_nodes: int = 64, **overrides) -> "DecodeConfig":
        """DDTree: the likeliest num_nodes prefixes under the baseline block's distributions, anchor included.

        Unlike the paper, trees of two blocks or more take the chain of likeliest tokens first; num_ranks tokens of a slot count.
        """
        return cls(**{"expand": "marginal", "num_nodes": num_nodes, **overrides})

    @classmethod
    def reanchor_tree(cls, num_nodes: int = 64, **overrides) -> "DecodeConfig":
        """The likeliest num_nodes prefixes of the baseline block and of blocks shifted from its rejected states, in one order."""
        return cls(**{"expand": "merge", "retain": "suffix", "num_nodes": num_nodes, **overrides})

    def resolve(self, block_size: int) -> "DecodeConfig":
        """Fill what depends on the drafter's block size B; a resolved config resolves to itself.

        A policy retains at most B-1 nodes (`baseline`, `suffix`), 2B-2 (`deepest`, `descendants`) or 3B-3 (`both`); with expand='merge' B/2
        unless told otherwise.
        Raises ValueError if num_nodes cannot hold the baseline block, and for more max_offsets than that (of `descendants`: than nodes).
        """
        chains = {"none": 0, "baseline": 1, "suffix": 1, "deepest": 2, "both": 3, "descendants": 2}[self.retain]
        # of a merged tree the first offsets bring all of the gain: eight of blocks of 16 as much as fifteen
        offsets = self.max_offsets or (block_size // 2 if self.expand == "merge" else chains * (block_size - 1))
        default = 64 if self.expand != "none" else min(block_size**2, 256) if offsets else block_size
        nodes = self.num_nodes or max(default, block_size)
        if nodes < block_size:
            raise ValueError(f"num_nodes ({nodes}) must hold the baseline block of {block_size} tokens; raise it to at least {block_size}.")
        most = nodes - 1 if self.retain == "descendants" else chains * (block_size - 1)
        if offsets > most:
            raise ValueError(
                f"max_offsets ({offsets}) exceeds the {most} nodes that retain={self.retain!r} can keep here; lower it, or leave it out."
            )
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


def _with_full(buckets: tuple[int, ...], full: int) -> tuple[int, ...]:
    return (*(size for size in buckets if size < full), full)
