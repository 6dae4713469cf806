"""Reference drafters in PyTorch: tiny random checkpoints in each published layout, and what they compute in float32.

In: a name, the target's `config.json` dict (or its vocab_size, hidden_size, num_hidden_layers), a seed, options of that name.
Out: a Reference: config, tensors, save; features, block states, base logits, greedy drafts, teacher-forced logits.
Source: the papers named in reference_backbones and reference_heads; the layouts are in reference_packagings.

    reference = make("domino", tiny_qwen3_config(), seed=3, shift_label=True, pure_draft_prefix_len=1)
    reference.save(directory)
    tokens, logits, confidences = reference.draft(taps, anchor_token, position, embed, head)

Options of every name: the sizes (num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, block_size,
target_layer_ids, mask_token_id, rope_theta, rope_scaling) and dtype="float32" | "bfloat16", that of the tensors on disk.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from reference_backbones import Backbone, Spec
from reference_heads import ConfidenceHead, DominoHead, MarkovHead
from reference_packagings import PACKAGINGS, Packaging
from safetensors.torch import save_file
from torch import Tensor, nn


class Drafter(nn.Module):
    """A backbone with all the heads its Spec names. Parameter names are DeepSpec's, with `logit_head.` before Domino's."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.backbone = Backbone(spec)
        if spec.has_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if spec.has_lm_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size or spec.vocab_size, bias=False)
        if spec.logit_head == "domino":
            self.logit_head = DominoHead(spec)
        elif spec.logit_head != "none":
            self.markov_head = MarkovHead(spec)
        if spec.has_confidence_head:
            self.confidence_head = ConfidenceHead(spec)
        if spec.draft_vocab_size:
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))


class Reference:
    """A random drafter of one family in one packaging. All results are float32, of the weights as rounded on disk.

    config: the dict of `config.json`. tensors: what `model.safetensors` holds; changing them changes the files, not the results.
    spec: what is computed. first_slot: slot that predicts the token after the anchor; may be set to try the other alignment.
    """

    def __init__(self, packaging: Packaging, seed: int, dtype: str):
        self.spec = packaging.spec
        self.first_slot = self.spec.first_slot
        self.drafter = Drafter(self.spec).requires_grad_(False)
        _fill(self.drafter, self.spec, torch.Generator().manual_seed(seed), getattr(torch, dtype))
        self.config = packaging.config
        for name in ("dtype", "torch_dtype"):
            if name in self.config:
                self.config[name] = dtype
        state = ((name.removeprefix("backbone."), tensor) for name, tensor in self.drafter.state_dict().items())
        self.tensors = {
            packaging.rename(name): tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor for name, tensor in state
        }

    @property
    def num_drafts(self) -> int:
        """Tokens a block drafts. (A server may cap it: shifted Domino runs with 15 of 16.)"""
        return self.spec.block_size - self.first_slot

    def save(self, directory: str | Path) -> None:
        """Write config.json and model.safetensors."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config, indent=2))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, directory / "model.safetensors", {"format": "pt"})

    def features(self, taps: Tensor) -> Tensor | list[Tensor]:
        """Context features [T D] of tapped layers [T E*D]; in DFlare a list with those of each draft layer."""
        features = self.drafter.backbone.features(taps)
        return features if self.spec.backbone == "dflare" else features[0]

    def block_states(self, taps: Tensor, anchor_token: int, position: int, embed: Tensor | None) -> Tensor:
        """Final-normed states [S D] of [anchor, mask, mask, ...] at `position` on, given taps [>= position, E*D] of all that precede."""
        if len(taps) < position:
            raise ValueError(f"taps has {len(taps)} rows, but the anchor lies at {position}; give a row for every earlier position.")
        slots = torch.full([self.spec.block_size], self.spec.mask_token_id)
        slots[0] = anchor_token
        contexts = self.drafter.backbone.features(taps[:position])  # strictly before the anchor
        return self.drafter.backbone(self._embedding(embed)[slots], contexts, position)

    def base_logits(self, states: Tensor, head: Tensor | None) -> Tensor:
        """Logits [num_drafts V] of the slots that predict, scaled and soft-capped, before any correction; V is the drafter's vocabulary."""
        head = self.drafter.lm_head.weight if self.spec.has_lm_head else head
        logits = states[self.first_slot :] @ head.T * self.spec.output_multiplier
        cap = self.spec.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def draft(
        self, taps: Tensor, anchor_token: int, position: int, embed: Tensor | None, head: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Greedy drafts, step by step.

        Returns tokens [num_drafts] (target ids), corrected logits [num_drafts V] (drafter's vocabulary), acceptance chances [num_drafts].
        """
        states = self.block_states(taps, anchor_token, position, embed)
        base, z = self.base_logits(states, head), states[self.first_slot :]
        token, recurrent = torch.tensor(anchor_token), None
        tokens, logits, confidences = [], [], []
        for index in range(self.num_drafts):
            corrected = base[index]
            if self._logit_head is not None:
                correction, recurrent = self._logit_head.step(index, token, z[index], recurrent, self._embedding(embed))
                corrected = corrected + correction
            confidences.append(self._confidences(token, z[index]))
            token = self.target_ids(corrected.argmax())
            tokens.append(token)
            logits.append(corrected)
        return torch.stack(tokens), torch.stack(logits), torch.stack(confidences) if self.spec.has_confidence_head else None

    def teacher_forced(self, taps: Tensor, tokens: Tensor, position: int, embed: Tensor | None, head: Tensor | None) -> Tensor:
        """Corrected logits [num_drafts V] of a block whose tokens [anchor, d1, d2, ...] (at least num_drafts) are given, in one go."""
        states = self.block_states(taps, int(tokens[0]), position, embed)
        base, z = self.base_logits(states, head), states[self.first_slot :]
        if self._logit_head is None:
            return base
        return base + self._logit_head.block(tokens[: self.num_drafts], z, self._embedding(embed))

    def target_ids(self, ids: Tensor) -> Tensor:
        """Target token ids of ids of the drafter's own vocabulary: d2t holds offsets."""
        return ids + self.drafter.d2t[ids] if self.spec.draft_vocab_size else ids

    @property
    def _logit_head(self) -> nn.Module | None:
        return getattr(self.drafter, "logit_head", None) or getattr(self.drafter, "markov_head", None)

    def _embedding(self, embed: Tensor | None) -> Tensor:
        return (self.drafter.embed_tokens.weight if self.spec.has_embedding else embed) * self.spec.input_embedding_scale

    def _confidences(self, previous: Tensor, z: Tensor) -> Tensor | None:
        if not self.spec.has_confidence_head:
            return None
        latents = self.drafter.markov_head.markov_w1.weight[previous] if self.spec.confidence_head_with_markov else None
        return torch.sigmoid(self.drafter.confidence_head(z, latents))


def make(name: str, target_shape: Mapping[str, Any], seed: int, *, dtype: str = "float32", **options: Any) -> Reference:
    """Build the drafter `name` (a key of PACKAGINGS) for a target. A TypeError names an option that name does not have."""
    return Reference(PACKAGINGS[name](target_shape, **options), seed, dtype)


def _fill(drafter: Drafter, spec: Spec, generator: torch.Generator, dtype: torch.dtype) -> None:
    """Draw every weight so that a missing multiply shows: norms 1 +- 0.25, biases of std 0.5, matrices of std fan_in^-0.5."""
    for name, tensor in drafter.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name == "t2d":
            kept = torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size].sort().values
            tensor[kept] = True
            drafter.d2t.copy_(kept - torch.arange(spec.draft_vocab_size))
        elif "norm" in name or name.endswith("layer_scalar"):
            values = 1 + 0.25 * noise
            # with attention scale 1 a unit q_norm makes the softmax one-hot
            tensor.copy_(values * spec.head_dim**-0.5 if spec.backbone == "gemma4" and "q_norm" in name else values)
        elif name.endswith("bias"):
            tensor.copy_(0.5 * noise)
        elif "markov_w1" in name or "layer_fusion" in name:
            tensor.copy_(noise)
        elif tensor.is_floating_point():
            tensor.copy_(noise * tensor.shape[1] ** -0.5)
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(dtype))
