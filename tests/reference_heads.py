"""Logit heads of the published drafters in torch.nn: Domino's GRU, DSpark's Markov heads, the confidence head.

In: a Spec; token before each drafted one, the slots' final-normed states z.
Out: additive corrections of the base logits, once token by token (`step`) and once for a given block (`block`), computed differently.
Source: Domino (arXiv 2605.29707), DSpark (arXiv 2607.05147).
"""

import torch
from reference_backbones import Spec
from torch import Tensor, nn
from torch.nn import functional


class DominoHead(nn.Module):
    """embed_proj([z_i ; s_i]) from draft P on, where the GRU state s_i has read the anchor and the i drafts before this one."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.num_pure = spec.pure_draft_prefix_len
        width, size, bottleneck = spec.hidden_size, spec.gru_hidden_dim, spec.emb_dim
        self.prefix_gru = nn.GRU(width, size, num_layers=1, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + size, bottleneck, bias=False), nn.SiLU(), nn.Linear(bottleneck, spec.vocab_size, bias=False)
        )

    def step(self, index: int, previous: Tensor, z: Tensor, state: Tensor | None, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """Correction [V] of draft `index` after the token `previous`, and the GRU state [G]; written out by hand."""
        state = torch.zeros(self.prefix_gru.hidden_size) if state is None else state
        state = gru_step(self.prefix_gru, embedding[previous], state)
        hidden = functional.silu(self.embed_proj[0].weight @ torch.cat([z, state]))
        correction = self.embed_proj[2].weight @ hidden
        return correction * (index >= self.num_pure), state

    def block(self, previous: Tensor, z: Tensor, embedding: Tensor) -> Tensor:
        """Corrections [N V] with torch's own GRU over the whole prefix."""
        states = self.prefix_gru(embedding[previous][None])[0][0]
        corrections = self.embed_proj(torch.cat([z, states], dim=-1))
        return torch.where(torch.arange(len(z))[:, None] >= self.num_pure, corrections, 0.0)


def gru_step(gru: nn.GRU, x: Tensor, state: Tensor) -> Tensor:
    """r, u = sigmoid(.), n = tanh(W_in x + r * (W_hn h)), h' = (1 - u) * n + u * h; rows of both matrices are r, u, n."""
    input_r, input_u, input_n = (gru.weight_ih_l0 @ x).chunk(3)
    state_r, state_u, state_n = (gru.weight_hh_l0 @ state).chunk(3)
    update = torch.sigmoid(input_u + state_u)
    candidate = torch.tanh(input_n + torch.sigmoid(input_r + state_r) * state_n)
    return (1 - update) * candidate + update * state


class MarkovHead(nn.Module):
    """W2 f(W1[previous], z): f is the identity (vanilla), a gate (gated) or a recurrence over the block (rnn).

    W1 is indexed by the target's vocabulary, W2 maps to the drafter's own.
    """

    def __init__(self, spec: Spec):
        super().__init__()
        rank, width = spec.markov_rank, spec.hidden_size
        self.kind, self.rank = spec.logit_head, rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size or spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def step(self, index: int, previous: Tensor, z: Tensor, state: Tensor | None, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
        """Correction [V] of one draft after the token `previous`, and the recurrent state [r]."""
        latent = self.markov_w1.weight[previous]
        if self.kind == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([z, latent])))
        elif self.kind == "rnn":
            state = torch.zeros(self.rank) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, latent, z])).chunk(3)
            keep = torch.sigmoid(gate)
            state = keep * state + (1 - keep) * torch.tanh(candidate)
            latent = torch.tanh(output)  # of the joint projection, not of the new state
        return self.markov_w2.weight @ latent, state

    def block(self, previous: Tensor, z: Tensor, embedding: Tensor) -> Tensor:
        """Corrections [N V]; all that does not recur is computed for the block at once."""
        latents = self.markov_w1(previous)
        if self.kind == "gated":
            latents = latents * torch.sigmoid(self.gate_proj(torch.cat([z, latents], dim=-1)))
        elif self.kind == "rnn":
            from_state, from_inputs = self.joint_proj.weight.split([self.rank, self.rank + z.shape[1]], dim=1)
            inputs = functional.linear(torch.cat([latents, z], dim=-1), from_inputs, self.joint_proj.bias)
            state, outputs = torch.zeros(self.rank), []
            for row in inputs:
                gate, candidate, output = (row + from_state @ state).chunk(3)
                outputs.append(torch.tanh(output))
                state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
            latents = torch.stack(outputs)
        return self.markov_w2(latents)


class ConfidenceHead(nn.Module):
    """Logit of the chance that a draft is accepted if those before it are; input [z ; W1[previous]], or z alone."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank * spec.confidence_head_with_markov, 1)

    def forward(self, z: Tensor, previous_latents: Tensor | None) -> Tensor:
        return self.proj(z if previous_latents is None else torch.cat([z, previous_latents], dim=-1)).squeeze(-1)
