"""Backbones of the published drafters in torch.nn: Qwen3 style (DFlash), Qwen3 with fused taps (DFlare), Gemma-4 global layers.

In: a Spec; context features, embeddings of the block's slots, the anchor's position.
Out: final-normed states of the slots. Parameter names are the published ones, so `state_dict()` needs little renaming.
Source: DFlash (arXiv 2602.06036), DFlare (arXiv 2606.02091), DeepSpec's Gemma4DSparkModel; everything runs in float32.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a drafter computes, whatever its files look like. Names are those of `config.json` where it has one.

    target_layer_ids: 0-based target layers whose outputs are tapped. num_target_layers: layers of the target.
    rope_scaling: None, or a dict whose rope_type is yarn or proportional. is_causal: None means sliding layers are, full ones are not.
    input_embedding_scale multiplies embeddings; output_multiplier, then final_logit_softcapping (0: none) act on base logits.
    first_slot: the slot that predicts the token after the anchor. logit_head: what corrects the base logits.
    emb_dim, gru_hidden_dim, pure_draft_prefix_len belong to Domino, markov_rank to the other heads.
    has_embedding, has_lm_head: whether the checkpoint holds its own. draft_vocab_size: rows of that lm_head; 0 means all.
    """

    vocab_size: int
    hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 7
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 10
    intermediate_size: int = 34
    rms_norm_eps: float = 1e-6
    backbone: Literal["qwen3", "dflare", "gemma4"] = "qwen3"
    rope_theta: float = 3000.0
    rope_scaling: dict[str, Any] | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    first_slot: Literal[0, 1] = 1
    logit_head: Literal["none", "domino", "vanilla", "gated", "rnn"] = "none"
    emb_dim: int = 9
    gru_hidden_dim: int = 13
    pure_draft_prefix_len: int = 0
    markov_rank: int = 11
    has_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    has_embedding: bool = False
    has_lm_head: bool = False
    draft_vocab_size: int = 0


class RMSNorm(nn.Module):
    """x / rms(x), times a weight unless it has none (Gemma-4's value norm)."""

    def __init__(self, size: int, epsilon: float, *, has_weight: bool = True):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return x if self.weight is None else x * self.weight


def rotary_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> tuple[Tensor, float]:
    """Radians a position of each pair of a head, and the factor on cos and sin."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    frequencies = theta ** (-2 * pairs / head_dim)
    if scaling is None:
        return frequencies, 1.0
    if scaling["rope_type"] == "proportional":
        # the exponent divides by the whole head; pairs past the rotary fraction do not turn
        num_turning = int(scaling["partial_rotary_factor"] * head_dim // 2)
        return torch.where(pairs < num_turning, frequencies, 0.0), 1.0
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often within the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_of(scaling.get("beta_slow", 1.0))), head_dim - 1)
    slowed = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / factor * slowed, 0.1 * math.log(factor) + 1.0


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, factor: float) -> Tensor:
    """Turn [rows heads A] by absolute positions; dimension i pairs with i + A/2."""
    angles = positions[:, None, None].float() * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible_keys(queries: Tensor, keys: Tensor, window: int | None, is_causal: bool | None) -> Tensor:
    """Which key positions each query position sees, as bools [queries keys]."""
    ahead = keys[None, :] - queries[:, None]
    visible = torch.ones_like(ahead, dtype=torch.bool)
    if window is not None:
        visible &= ahead > -window
        visible &= ahead < window
    if window is not None if is_causal is None else is_causal:
        visible &= ahead <= 0
    return visible


class Attention(nn.Module):
    """Queries from the block; keys and values from [context ; block], in that order."""

    def __init__(self, spec: Spec, window: int | None):
        super().__init__()
        width, size = spec.hidden_size, spec.head_dim
        self.spec, self.window = spec, window
        self.q_proj = nn.Linear(width, spec.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        if spec.backbone == "gemma4":
            self.v_norm = RMSNorm(size, spec.rms_norm_eps, has_weight=False)
        else:
            self.v_proj = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        if spec.backbone == "dflare":
            self.k_proj_target = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
            self.v_proj_target = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(spec.num_attention_heads * size, width, bias=False)
        self.q_norm = RMSNorm(size, spec.rms_norm_eps)
        self.k_norm = RMSNorm(size, spec.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, position: int) -> Tensor:
        spec = self.spec
        is_fused = spec.backbone == "dflare"
        keys = torch.cat([(self.k_proj_target if is_fused else self.k_proj)(context), self.k_proj(x)])
        keys = keys.unflatten(-1, (spec.num_key_value_heads, spec.head_dim))
        if spec.backbone == "gemma4":
            values = self.v_norm(keys)  # of the raw projection: neither k_norm nor rotary touch it
        else:
            values = torch.cat([(self.v_proj_target if is_fused else self.v_proj)(context), self.v_proj(x)])
            values = values.unflatten(-1, (spec.num_key_value_heads, spec.head_dim))
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (spec.num_attention_heads, spec.head_dim)))

        key_positions = torch.arange(len(keys)) + (position - len(context))
        query_positions = position + torch.arange(len(x))
        frequencies, factor = rotary_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        queries = rotate(queries, query_positions, frequencies, factor)
        keys = rotate(self.k_norm(keys), key_positions, frequencies, factor)

        repeats = spec.num_attention_heads // spec.num_key_value_heads
        scores = torch.einsum("qha,kha->hqk", queries, keys.repeat_interleave(repeats, dim=1))
        scores = scores * (1.0 if spec.backbone == "gemma4" else spec.head_dim**-0.5)
        visible = visible_keys(query_positions, key_positions, self.window, spec.is_causal)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hqk,kha->qha", weights, values.repeat_interleave(repeats, dim=1))
        return self.o_proj(mixed.flatten(1))


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)); SiLU, or tanh-approximated GELU in Gemma."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.is_gelu = spec.backbone == "gemma4"
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = functional.gelu(gate, approximate="tanh") if self.is_gelu else functional.silu(gate)
        return self.down_proj(gate * self.up_proj(x))


class Qwen3Layer(nn.Module):
    def __init__(self, spec: Spec, window: int | None):
        super().__init__()
        self.self_attn = Attention(spec, window)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, position: int) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, position)
        return x + self.mlp(self.post_attention_layernorm(x))


class Gemma4Layer(nn.Module):
    """Both sublayers are normed before and after; the whole stream is scaled at the end."""

    def __init__(self, spec: Spec, window: int | None):
        super().__init__()
        self.self_attn = Attention(spec, window)
        self.mlp = MLP(spec)
        for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"):
            self.add_module(name, RMSNorm(spec.hidden_size, spec.rms_norm_eps))
        self.register_buffer("layer_scalar", torch.empty(1))

    def forward(self, x: Tensor, context: Tensor, position: int) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), context, position))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Backbone(nn.Module):
    """Layers, norms and the fusion of the tapped target layers. The context skips input_layernorm, MLP and residuals."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        layer = Gemma4Layer if spec.backbone == "gemma4" else Qwen3Layer
        kinds = spec.layer_types or ("full_attention",) * spec.num_hidden_layers
        self.layers = nn.ModuleList(layer(spec, spec.sliding_window if kind == "sliding_attention" else None) for kind in kinds)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        num_taps = len(spec.target_layer_ids)
        if spec.backbone == "dflare":
            self.layer_fusion_weights = nn.Parameter(torch.empty(spec.num_hidden_layers, num_taps))
        else:
            self.fc = nn.Linear(num_taps * spec.hidden_size, spec.hidden_size, bias=False)

    def features(self, taps: Tensor) -> list[Tensor]:
        """Context of each layer: hidden_norm of the fused taps [T E*D]; one and the same for all layers but in DFlare."""
        if self.spec.backbone != "dflare":
            return [self.hidden_norm(self.fc(taps))] * self.spec.num_hidden_layers
        taps = taps.unflatten(-1, (len(self.spec.target_layer_ids), self.spec.hidden_size))
        # softmax in float32; fuse first, then norm
        shares = self.layer_fusion_weights.softmax(dim=1)
        return [self.hidden_norm(torch.einsum("e,ted->td", share, taps)) for share in shares]

    def forward(self, x: Tensor, contexts: list[Tensor], position: int) -> Tensor:
        """Final-normed states [S D] of a block whose first slot lies at `position`, right after the context."""
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, context, position)
        return self.norm(x)
