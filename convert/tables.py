"""Where each tensor of a PyTorch checkpoint goes; data only, read in both directions.

In: the family of a checkpoint.
Out: its table of rules.
Source: state dicts of transformers' LlamaForCausalLM and Qwen3ForCausalLM, and of z-lab's DFlashDraftModel.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Transform = Literal["none", "transpose"]


class Rule(NamedTuple):
    """One tensor, or one tensor of every layer.

    source: its key; {prefix} stands for one of the table's prefixes, {layer} for a layer number.
    destination: path of the leaf it fills.
    transform: PyTorch stores linear maps [outputs, inputs], we store [inputs, outputs].
    """

    source: str
    destination: str
    transform: Transform


class Table(NamedTuple):
    """Rules of one family.

    prefixes: accepted spellings of {prefix}; the first is the one written.
    rules: every leaf of the model has exactly one.
    repeats: keys that, in a model without a leaf for them, may repeat another leaf: a tied head.
    ignored: keys that hold no weights.
    """

    prefixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    repeats: Mapping[str, str]
    ignored: tuple[str, ...]


_LAYER_RULES = (
    Rule("{prefix}layers.{layer}.input_layernorm.weight", "layers/{layer}/attention_norm/scale", "none"),
    Rule("{prefix}layers.{layer}.self_attn.q_proj.weight", "layers/{layer}/attention/query/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.self_attn.k_proj.weight", "layers/{layer}/attention/key/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.self_attn.v_proj.weight", "layers/{layer}/attention/value/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.self_attn.o_proj.weight", "layers/{layer}/attention/output/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.post_attention_layernorm.weight", "layers/{layer}/mlp_norm/scale", "none"),
    Rule("{prefix}layers.{layer}.mlp.gate_proj.weight", "layers/{layer}/mlp/gate/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.mlp.up_proj.weight", "layers/{layer}/mlp/up/kernel", "transpose"),
    Rule("{prefix}layers.{layer}.mlp.down_proj.weight", "layers/{layer}/mlp/down/kernel", "transpose"),
)

_QK_NORM_RULES = (
    Rule("{prefix}layers.{layer}.self_attn.q_norm.weight", "layers/{layer}/attention/query_norm/scale", "none"),
    Rule("{prefix}layers.{layer}.self_attn.k_norm.weight", "layers/{layer}/attention/key_norm/scale", "none"),
)

_TARGET_RULES = (
    Rule("{prefix}embed_tokens.weight", "embedding/embedding", "none"),
    Rule("{prefix}norm.weight", "norm/scale", "none"),
    Rule("lm_head.weight", "head/kernel", "transpose"),
)

_DRAFTER_RULES = (
    Rule("{prefix}fc.weight", "fusion/kernel", "transpose"),
    Rule("{prefix}hidden_norm.weight", "context_norm/scale", "none"),
    Rule("{prefix}norm.weight", "norm/scale", "none"),
)

LLAMA = Table(
    prefixes=("model.", ""),
    rules=_TARGET_RULES + _LAYER_RULES,
    repeats={"lm_head.weight": "embedding/embedding"},
    ignored=("{prefix}layers.{layer}.self_attn.rotary_emb.inv_freq",),
)
QWEN3 = LLAMA._replace(rules=_TARGET_RULES + _LAYER_RULES + _QK_NORM_RULES)
DFLASH = Table(prefixes=("", "model."), rules=_DRAFTER_RULES + _LAYER_RULES + _QK_NORM_RULES, repeats={}, ignored=())

TABLES = {"llama": LLAMA, "qwen3": QWEN3, "dflash": DFLASH}
