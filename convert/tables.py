"""Where each tensor of a PyTorch checkpoint goes; data only, read in both directions.

In: a model's config.
Out: its table of rules.
Source: state dicts of transformers' LlamaForCausalLM, Qwen3ForCausalLM and Gemma4UnifiedForConditionalGeneration, and the published
    drafters of z-lab, Domino, DeepSpec, SpecForge, speculators, ModelOpt, AngelSlim and AngelSpec.
"""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from reanchor_jax.config import DrafterConfig, TargetConfig

Transform = Literal["none", "transpose", "offsets"]


class Share(NamedTuple):
    """The entries start..stop-1 of an axis of a leaf that several tensors fill beside each other; as of a slice, ends count from behind."""

    axis: int
    start: int | None
    stop: int | None


class Rule(NamedTuple):
    """One tensor, or one tensor of every layer. A tensor may have several rules, of which a model has the leaf of one at most.

    source: its key; {prefix} stands for the table's prefix, {layer} for a layer number.
    destination: path of the leaf it fills, or fills a share of.
    transform: PyTorch stores linear maps [outputs, inputs], we store [inputs, outputs], or outputs on several axes; token maps hold
        differences from the index.
    share: None if the tensor is all of the leaf.
    """

    source: str
    destination: str
    transform: Transform
    share: Share | None = None


class Table(NamedTuple):
    """Rules of one model.

    prefix: written in front of keys. prefixes: stripped from keys when reading, as often as they occur.
    aliases: other spellings and the key they stand for, as regular expressions of keys without prefix.
    rules: every leaf of the model has those of the tensors that fill it.
    repeats: keys that, in a model without a leaf for them, may repeat another leaf: a tied head.
    ignored: regular expressions of keys without prefix that hold nothing the model needs.
    """

    prefix: str
    prefixes: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    rules: tuple[Rule, ...]
    repeats: Mapping[str, str]
    ignored: tuple[str, ...]


def bare(key: str, table: Table) -> str:
    """The key as the rules know it: without prefixes, in the rules' own spelling."""
    while found := next((prefix for prefix in table.prefixes if key.startswith(prefix)), None):
        key = key.removeprefix(found)
    for pattern, replacement in table.aliases:
        key = re.sub(f"^{pattern}", replacement, key)
    return key


def target_table(config: TargetConfig) -> Table:
    """The table of a target."""
    norms = _GEMMA_NORMS if config.family == "gemma4" else _NORMS + (() if config.family == "llama" else _QK_NORMS)
    multimodal = r"(embed_vision|embed_audio|vision_tower|audio_tower)\..*" if config.family == "gemma4" else None
    return Table(
        prefix="model.",
        prefixes=("model.", "language_model."),
        aliases=(),
        rules=_TARGET + _PROJECTIONS + norms,
        repeats={"lm_head.weight": "embedding/embedding"},
        ignored=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", *([] if multimodal is None else [multimodal])),
    )


def drafter_table(config: DrafterConfig) -> Table:
    """The table of a drafter; what it does not have (embedding, head, mixture of taps) matches no leaf of its model.

    Raises ValueError for families of which no PyTorch checkpoint exists.
    """
    for name, is_so in (("xPress", config.head is not None and config.head.kind == "refiner"), ("DBLast", config.mixture is not None)):
        if is_so:
            raise ValueError(f"{name} drafters have no PyTorch layout, none was ever published; keep them as directories of ours.")
    heads = () if config.head is None else _GRU if config.head.kind == "gru" else _MARKOV
    norms = _GEMMA_NORMS if config.family == "gemma4" else _NORMS + _QK_NORMS
    return Table(
        prefix="",
        prefixes=DRAFTER_PREFIXES,
        aliases=DRAFTER_ALIASES,
        rules=_DRAFTER + _PROJECTIONS + norms + heads,
        repeats={},
        ignored=("t2d",),
    )


def _layer(source: str, destination: str, transform: Transform = "none", share: Share | None = None) -> Rule:
    return Rule("{prefix}layers.{layer}." + source, "layers/{layer}/" + destination, transform, share)


_PROJECTIONS = (
    # a joint map, without values where keys serve as values, and the two maps of a drafter
    _layer("self_attn.q_proj.weight", "attention/query_key_value/kernel", "transpose", Share(2, None, -2)),
    _layer("self_attn.k_proj.weight", "attention/query_key_value/kernel", "transpose", Share(2, -2, -1)),
    _layer("self_attn.v_proj.weight", "attention/query_key_value/kernel", "transpose", Share(2, -1, None)),
    _layer("self_attn.q_proj.weight", "attention/query_key/kernel", "transpose", Share(2, None, -1)),
    _layer("self_attn.k_proj.weight", "attention/query_key/kernel", "transpose", Share(2, -1, None)),
    _layer("self_attn.q_proj.weight", "attention/query/kernel", "transpose"),
    _layer("self_attn.k_proj.weight", "attention/key_value/kernel", "transpose", Share(1, 0, 1)),
    _layer("self_attn.v_proj.weight", "attention/key_value/kernel", "transpose", Share(1, 1, 2)),
    _layer("self_attn.k_proj.weight", "attention/key/kernel", "transpose"),
    _layer("self_attn.o_proj.weight", "attention/output/kernel", "transpose"),
    _layer("mlp.gate_proj.weight", "mlp/gate_up/kernel", "transpose", Share(1, 0, 1)),
    _layer("mlp.up_proj.weight", "mlp/gate_up/kernel", "transpose", Share(1, 1, 2)),
    _layer("mlp.down_proj.weight", "mlp/down/kernel", "transpose"),
    _layer("input_layernorm.weight", "attention_norm/scale"),
)
_NORMS = (_layer("post_attention_layernorm.weight", "mlp_norm/scale"),)
_QK_NORMS = (
    _layer("self_attn.q_norm.weight", "attention/query_norm/scale"),
    _layer("self_attn.k_norm.weight", "attention/key_norm/scale"),
)
# the same name as above stands for another norm here: of the attention's output
_GEMMA_NORMS = (
    *_QK_NORMS,
    _layer("post_attention_layernorm.weight", "attention_output_norm/scale"),
    _layer("pre_feedforward_layernorm.weight", "mlp_norm/scale"),
    _layer("post_feedforward_layernorm.weight", "mlp_output_norm/scale"),
    _layer("layer_scalar", "scale"),
)
_TARGET = (
    Rule("{prefix}embed_tokens.weight", "embedding/embedding", "none"),
    Rule("{prefix}norm.weight", "norm/scale", "none"),
    Rule("lm_head.weight", "head/kernel", "transpose"),
)
_DRAFTER = (
    *_TARGET,
    Rule("fc.weight", "fusion/kernel", "transpose"),
    Rule("hidden_norm.weight", "context_norm/scale", "none"),
    Rule("layer_fusion_weights", "mixture", "none"),
    Rule("layers.{layer}.self_attn.k_proj_target.weight", "contexts/{layer}/kernel", "transpose", Share(1, 0, 1)),
    Rule("layers.{layer}.self_attn.v_proj_target.weight", "contexts/{layer}/kernel", "transpose", Share(1, 1, 2)),
    Rule("confidence_head.proj.weight", "confidence/output/kernel", "transpose"),
    Rule("confidence_head.proj.bias", "confidence/output/bias", "none"),
    Rule("d2t", "vocabulary", "offsets"),
)
_GRU = (
    Rule("prefix_gru.weight_ih_l0", "causal_head/from_token/kernel", "transpose"),
    Rule("prefix_gru.weight_hh_l0", "causal_head/from_state/kernel", "transpose"),
    Rule("embed_proj.0.weight", "causal_head/inner/kernel", "transpose"),
    Rule("embed_proj.2.weight", "causal_head/output/kernel", "transpose"),
)
_MARKOV = (
    Rule("markov_head.markov_w1.weight", "causal_head/embedding/embedding", "none"),
    Rule("markov_head.markov_w2.weight", "causal_head/output/kernel", "transpose"),
    Rule("markov_head.gate_proj.weight", "causal_head/gate/kernel", "transpose"),
    Rule("markov_head.gate_proj.bias", "causal_head/gate/bias", "none"),
    Rule("markov_head.joint_proj.weight", "causal_head/joint/kernel", "transpose"),
    Rule("markov_head.joint_proj.bias", "causal_head/joint/bias", "none"),
)
DRAFTER_PREFIXES = ("_orig_mod.", "logit_head.", "dflash_module.", "draft_model.", "model.")
DRAFTER_ALIASES = (
    (r"context_proj\.", "fc."),
    (r"context_norm\.", "hidden_norm."),
    (r"final_norm\.", "norm."),
    (r"(markov_w1|markov_w2|gate_proj|joint_proj)\.", r"markov_head.\1."),
    (r"confidence_proj\.", "confidence_head.proj."),
)
