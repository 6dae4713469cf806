"""The demonstration: a story, then the methods side by side.

In: an embedded pair or a directory.
Out: text on standard output; the figures as `compare.results` gives them.
Source: none.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from reanchor_jax import pairs
from reanchor_jax.bench import compare, methods, tables
from reanchor_jax.bench.methods import Outcome, Request
from reanchor_jax.checkpoint import leaves
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.models.drafter import Models
from reanchor_jax.streaming import stream_text
from reanchor_jax.text import encode, load_tokenizer

_PROMPTS = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, Tom and his dog",
    "The big bear was",
    "Sara had a red ball.",
    "In the garden there was",
    "It was a sunny day and",
)
_STORY_METHOD = "reanchor"
_METHODS = ("autoregressive", "dflash", "reanchor", "reanchor-tree")
_NEW_TOKENS = 200
_COLORS = ("\033[36m", "\033[33m")  # cyan and yellow: readable on dark and light
_PLAIN = "\033[0m"


def run(name_or_directory: str) -> dict[str, Any]:
    """Show the demonstration and return its figures. Raises ValueError if the pair lacks a drafter or a tokenizer."""
    start = time.perf_counter()
    where = pairs.find(name_or_directory)
    models, tokenizer = pairs.load_pair(name_or_directory), load_tokenizer(where.target)
    if models.drafter is None or tokenizer is None:
        raise ValueError(f"{name_or_directory} lacks a {'drafter' if models.drafter is None else 'tokenizer'}; the demo needs both.")
    surroundings = compare.environment(models)
    sizes = _num_parameters(models.target), _num_parameters(models.drafter)
    block_size = models.drafter.config.block_size
    print(f"{where.target.name}: target of {sizes[0]:,} parameters, drafter of {sizes[1]:,}, blocks of {block_size}")
    print(f"{surroundings['device']}, {tables.cores(surroundings)}, {surroundings['dtype']}, jax {surroundings['versions']['jax']}\n")

    request = Request(max_new_tokens=_NEW_TOKENS, stop_token_ids=models.target.config.eos_token_ids)
    prompts = [encode(tokenizer, text) for text in _PROMPTS]
    configs = {name: methods.method_config(name, models, prompts, request=request) for name in _METHODS}
    _tell_story(models, tokenizer, prompts, configs[_STORY_METHOD], request)

    print(f"\nThe same on {len(prompts)} prompts, greedy, up to {_NEW_TOKENS} tokens each, methods taking turns:", flush=True)
    runs = compare.compare(models, prompts, configs, request=request)
    figures = compare.results(models, prompts, runs, request=request)
    print("\n" + tables.terminal_table(figures))
    print(f"\nTarget passes by accepted drafts ({block_size - 1}+, the ceiling: every draft of a block):")
    print(tables.histograms(figures, _METHODS[1:], block_size=block_size))
    print(f"\nidentical output: {'yes' if figures['identical'] else 'NO'}")
    for line in tables.divergence_lines(figures):
        print(line)
    print()
    if sizes[1] > sizes[0] / 4:
        print(f"The drafter has {sizes[1] / sizes[0]:.1f} times the parameters of its target: a draft costs what it could save.")
    print("A drafter trained on stories that begin like these has it easy: on unseen texts tau is lower.")
    if any(value is not None and value < 1 for value in figures["speedup"].values()):
        print("Models this small are limited by arithmetic, not by reading weights: every")
        print("extra token of a pass takes its time. Look at tau and the equal outputs here.")
    compiling = sum(run.warmup_seconds for run in runs)
    print(f"\n{time.perf_counter() - start:.0f} seconds in all, {compiling:.0f} of them compiling and warming up the table's methods.")
    return figures


def _tell_story(models: Models, tokenizer: Any, prompts: list[list[int]], config: DecodeConfig, request: Request) -> None:
    """Print the first prompt's continuation as it is decoded; each target pass has its own colour."""
    is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"compiling a round of {_STORY_METHOD} ...", file=sys.stderr, flush=True)
    seen: list[Outcome] = []

    def new_tokens() -> Iterator[list[int]]:
        for outcome in methods.stream(models, prompts, 0, config=config, request=request):
            num_seen = len(seen[-1].tokens) if seen else 0
            seen.append(outcome)
            yield outcome.tokens[num_seen:]

    print(_PROMPTS[0], end="", flush=True)
    for piece in stream_text(tokenizer, prompts[0], new_tokens()):
        print(f"{_COLORS[len(seen) % 2]}{piece}{_PLAIN}" if is_colored else piece, end="", flush=True)
    counts = seen[-1].rounds["num_emitted"]
    shade = "; a change of colour is a new pass" if is_colored else ""
    print(f"\n[{len(seen[-1].tokens)} tokens by {_STORY_METHOD} in {len(counts)} target passes{shade}]")


def _num_parameters(module: Any) -> int:
    return sum(leaf.size for leaf in leaves(module).values())
