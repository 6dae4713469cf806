"""Greedy decoding by transformers, and where another greedy decoding leaves it.

In: a transformers model in float32, prompts as token ids.
Out: new tokens of a prompt; the first divergence of two outputs with the margin of the model's choice there.
Source: none. A margin below NEAR_TIE is rounding: two correct programs may then choose differently, and it is reported, not hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

NEAR_TIE = 1e-4  # logits


class Divergence(NamedTuple):
    """prompt: index of the prompt. place: index of the new token that differs. margin: first minus second logit of the model there."""

    prompt: int
    place: int
    margin: float


def transformers_greedy(model: Any, prompt: Sequence[int], *, max_new_tokens: int, stop_token_ids: Sequence[int]) -> list[int]:
    """New tokens of `generate` for one prompt, stop token included."""
    import torch

    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=list(stop_token_ids),
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def divergences(
    model: Any, prompts: Sequence[Sequence[int]], expected: Sequence[list[int]], found: Sequence[list[int]]
) -> list[Divergence]:
    """First divergence of every prompt whose outputs differ."""
    import torch

    result = []
    for index, (prompt, mine, other) in enumerate(zip(prompts, expected, found, strict=True)):
        if mine == other:
            continue
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
        with torch.no_grad():
            top = model(torch.tensor([[*prompt, *mine[:place]]])).logits[0, -1].topk(2).values
        result.append(Divergence(prompt=index, place=place, margin=float(top[0] - top[1])))
    return result


def check_divergences(found: Sequence[Divergence]) -> None:
    """Fail on a divergence that is no near-tie; mark the test as an expected failure, with the margins, if near-ties are all there is."""
    assert not [divergence for divergence in found if divergence.margin >= NEAR_TIE], found
    if found:
        pytest.xfail(f"outputs differ at near-ties only: {found}")
