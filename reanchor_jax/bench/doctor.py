"""Examine a pair: do target and drafter belong together, is the output plain decoding's, is tau what it should be, and if not, why.

In: Models, a tokenizer, prompts, the least tau that is well.
Out: a Report, and its lines.
Source: the silent faults of published drafters: taps one layer off, the other alignment, a window or a mask token that was not trained.
    None of them shows in the text, all of them in tau, so each is tried the other way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from reanchor_jax import checkpoint
from reanchor_jax.bench import compare, methods
from reanchor_jax.bench.compare import BASELINE, CHAIN
from reanchor_jax.bench.methods import Request
from reanchor_jax.config import DrafterConfig, check_pair
from reanchor_jax.decoding.state import require_drafter
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.training.rollouts import roll_out

FLOOR = 1.5
_BETTER = 1.2  # of the tau as it is: by so much another setting must win to be called the cause
_NEAR_TIE = 1e-3  # logits: a float32 pass over many tokens may choose the other side of it
_NUM_SAMPLED, _SAMPLED_LENGTH = 6, 24


class Suspect(NamedTuple):
    """A setting that may be wrong. name: what it would mean. tau: with it the other way."""

    name: str
    tau: float


class Report(NamedTuple):
    """What was found. facts: lines about the pair. divergences: margins, in logits, where outputs leave plain decoding's. taus: by method.

    suspects: tried where tau is below the floor, the best first. floor: the least tau that is well.
    """

    facts: list[str]
    divergences: dict[str, list[float]]
    taus: dict[str, float]
    suspects: list[Suspect]
    floor: float

    @property
    def is_well(self) -> bool:
        """Whether outputs differ at near-ties only, and the chain's tau reaches the floor."""
        return self.taus[CHAIN] >= self.floor and all(margin < _NEAR_TIE for margins in self.divergences.values() for margin in margins)


def sampled_prompts(models: Models, begin_token: int, *, seed: int = 0) -> list[list[int]]:
    """Beginnings that the target samples itself: any drafter made for it should know their like."""
    found = roll_out(
        models.target,
        [[begin_token]] * _NUM_SAMPLED,
        length=_SAMPLED_LENGTH,
        temperatures=[1.0] * _NUM_SAMPLED,
        seed=seed,
        num_rows=_NUM_SAMPLED,
        show_progress=False,
    )
    return found.tokens.tolist()


def examine(
    models: Models,
    prompts: Sequence[Sequence[int]],
    *,
    tokenizer: Any = None,
    floor: float = FLOOR,
    max_new_tokens: int = 48,
    show_progress: bool = True,
) -> Report:
    """Decode the prompts greedily, plainly, by the chain and by ReAnchor; where the chain's tau is below floor, try settings the other way.

    tokenizer: its size is compared with the vocabulary, its special tokens are tried as the mask; None leaves that out.
    Raises ValueError if there is no drafter, or one that does not belong to the target.
    """
    drafter = require_drafter(models)
    check_pair(models.target.config, drafter.config)
    request = Request(max_new_tokens=max_new_tokens, stop_token_ids=models.target.config.eos_token_ids)
    names = (BASELINE, CHAIN, "reanchor")
    configs = {name: methods.method_config(name, models, prompts, request=request) for name in names}
    runs = compare.compare(models, prompts, configs, request=request, show_progress=show_progress)
    figures = compare.results(models, prompts, runs, request=request)["methods"]
    taus = {name: figures[name]["tau"] for name in names[1:]}
    suspects = []
    if taus[CHAIN] < floor:
        others = _others(drafter.config, tokenizer)
        for name, config in tqdm(others.items(), desc="trying", disable=not show_progress):
            changed = models._replace(drafter=_with_config(drafter, config))
            chain = {name: methods.method_config(name, changed, prompts, request=request) for name in (BASELINE, CHAIN)}
            found = compare.compare(changed, prompts, chain, request=request, done=[run for run in runs if run.method == BASELINE])
            suspects.append(Suspect(name=name, tau=compare.results(changed, prompts, found, request=request)["methods"][CHAIN]["tau"]))
    return Report(
        facts=_facts(models, drafter.config, tokenizer),
        divergences={name: [found["margin"] for found in figures[name]["divergences"]] for name in names[1:]},
        taus=taus,
        suspects=sorted(suspects, key=lambda suspect: -suspect.tau),
        floor=floor,
    )


def report_lines(report: Report, *, has_template: bool, is_chat: bool) -> list[str]:
    """The report in words. has_template: whether the tokenizer has a chat template; is_chat: whether the prompts went through it."""
    lines = list(report.facts)
    for name, margins in report.divergences.items():
        wide = [margin for margin in margins if margin >= _NEAR_TIE]
        if wide:
            lines.append(
                f"output: {name} DIFFERS from plain decoding where the target was sure (by {max(wide):.2g} logits): a bug, tell us."
            )
        else:
            ties = f", but for {len(margins)} near-ties of rounding" if margins else ""
            lines.append(f"output: {name} equals plain decoding{ties}")
    lines.append("tau: " + ", ".join(f"{name} {tau:.2f}" for name, tau in report.taus.items()) + f" (floor {report.floor:g})")
    if report.taus[CHAIN] < report.floor:
        lines += [f"tried the other way: {suspect.name}: {suspect.tau:.2f}" for suspect in report.suspects]
        best = report.suspects[0] if report.suspects else None
        if best is not None and best.tau >= _BETTER * report.taus[CHAIN]:
            lines.append(f"likely cause: {best.name}; convert the drafter again with that setting")
        else:
            lines.append("no single setting explains it: the drafter may belong to other weights of this target, or to other texts")
            if has_template and not is_chat:
                lines.append("the tokenizer has a chat template and the prompts did not go through it: try --chat")
            if is_chat:
                lines.append("if the template knows thinking, the drafter may have learned the other mode")
    lines.append("well" if report.is_well else "NOT well")
    return lines


def _facts(models: Models, config: DrafterConfig, tokenizer: Any) -> list[str]:
    target = models.target.config
    alignment = "the next place" if config.is_shifted else "its own place"
    lines = [
        f"target: {target.num_layers} layers of width {target.width}, vocabulary {target.vocab_size}, {target.max_positions} positions",
        f"drafter: {config.num_layers} layers, {config.num_drafts} drafts a block, a slot predicts {alignment}, taps "
        f"{', '.join(map(str, config.target_layer_ids))}, mask token {config.mask_token_id}",
    ]
    if tokenizer is not None and len(tokenizer) != target.vocab_size:
        why = "padding" if len(tokenizer) < target.vocab_size else "ids that the target does not have"
        lines.append(f"vocabulary: the tokenizer knows {len(tokenizer)} tokens, the target {target.vocab_size} ({why})")
    return lines


def _others(config: DrafterConfig, tokenizer: Any) -> dict[str, DrafterConfig]:
    """The drafter's config with one setting the other way each, by what that would mean. Weights fit all of them."""
    found = {}
    last = config.num_target_layers
    for step, word in ((-1, "lower"), (1, "higher")):
        taps = tuple(tap + step for tap in config.target_layer_ids)
        if min(taps) >= -1 and (last is None or max(taps) < last):
            found[f"taps lie one layer {word}"] = replace(config, target_layer_ids=taps)
    if config.num_drafts <= config.num_slots - 1:
        other = "its own place" if config.is_shifted else "the next place"
        found[f"a slot predicts {other}"] = replace(config, is_shifted=not config.is_shifted)
    if any(layer.window is not None for layer in config.layers):
        found["layers have no window"] = replace(config, layers=tuple(replace(layer, window=None) for layer in config.layers))
    found["slots see later slots the other way"] = replace(
        config, layers=tuple(replace(layer, is_causal=not layer.is_causal) for layer in config.layers)
    )
    special = {getattr(tokenizer, f"{name}_token_id", None) for name in ("mask", "unk", "pad", "bos", "eos")}
    for token in sorted(token for token in special if token is not None and token != config.mask_token_id):
        if token < config.vocab_size:
            found[f"the mask token is {token}"] = replace(config, mask_token_id=token)
    return found


def _with_config(drafter: Drafter, config: DrafterConfig) -> Drafter:
    """The same weights under another config."""
    values = checkpoint.leaves(drafter)
    return checkpoint.with_leaves(checkpoint.build_drafter(config, np.dtype(drafter.norm.scale[...].dtype)), values)
