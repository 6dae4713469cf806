"""Compare every method with `autoregress` on a pair and real prompts, over a grid of settings; a script, not a test.

    python tests/losslessness_grid.py --stories STORIES.json --out grid.json [--pair stories260k] [--huggingface DIR]

In: a pair; a JSON list of texts, the first tokens of which are the prompts.
Out: a JSON file with, for every cell (method, draft choice, batch, temperature, top-p), the rows that differ, the near-ties among them,
    and tau. Cells already in the file are not run again, so an interrupted grid goes on where it stopped.
"""

import argparse
import importlib
import itertools
import json
import os
import time
from pathlib import Path

import jax
import numpy as np
from divergence import find_divergences
from greedy import divergences, transformers_greedy
from tqdm import tqdm

from reanchor_jax import DecodeConfig, autoregress, generate, load_pair, make_sampling, pairs, summarize
from reanchor_jax.bench.methods import Request, method_config
from reanchor_jax.decoding.config import DRAFT_CHOICES
from reanchor_jax.decoding.sampling import row_keys
from reanchor_jax.text import encode, load_tokenizer

METHODS = "dflash,reanchor,reanchor-suffix,reanchor-deepest,reanchor-both,reanchor-descendants,ddtree,reanchor-tree"
PLAIN_BATCH = 5  # of the plain rows that every cell is compared with


def main():
    parser = argparse.ArgumentParser(description="Count differences from autoregress over a grid of settings.")
    parser.add_argument("--pair", default="stories260k", help="embedded pair or directory")
    parser.add_argument("--stories", type=Path, required=True, help="JSON list of texts")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write, or to continue")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=METHODS, help="as of `reanchor-jax bench`, with commas between (default: %(default)s)")
    parser.add_argument("--temperatures", default="0,0.7,1")
    parser.add_argument("--top-ps", default="1,0.9")
    parser.add_argument("--batches", default="5,1")
    parser.add_argument("--huggingface", type=Path, help="directory of the target in transformers' layout: compare greedy rows with it too")
    arguments = parser.parse_args()
    if arguments.huggingface is not None:
        importlib.import_module("torch")  # missing, it is missed now and not after hours
    settings = {name: str(value) for name, value in vars(arguments).items() if name not in ("out", "huggingface")}
    report = {"settings": settings, "cells": {}}
    if arguments.out.exists():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
        if report["settings"] != settings:
            raise SystemExit(f"{arguments.out} was made with {report['settings']}; choose another --out for {settings}.")
    run_grid(arguments, report)
    if arguments.huggingface is not None and "huggingface" not in report:
        report["huggingface"] = compare_with_transformers(arguments)
        write(arguments.out, report)
    cells = report["cells"].values()
    print(f"{len(cells)} cells, {sum(cell['rows'] for cell in cells)} rows, {sum(cell['tokens'] for cell in cells)} tokens")
    print(f"differences {sum(cell['differences'] for cell in cells)}, of them near-ties {sum(cell['near_ties'] for cell in cells)}")
    if "huggingface" in report:
        print(f"transformers, greedy: {report['huggingface']}")


def run_grid(arguments, report):
    """Fill in the cells that are missing, writing the file after each."""
    models, tokens = load_pair(arguments.pair, dtype="float32"), read_prompts(arguments)
    methods = [("autoregressive", "argmax"), *itertools.product(arguments.methods.split(","), DRAFT_CHOICES)]
    batches, temperatures, top_ps = (
        [kind(value) for value in given.split(",")]
        for kind, given in ((int, arguments.batches), (float, arguments.temperatures), (float, arguments.top_ps))
    )
    grid = list(itertools.product(methods, batches, temperatures, top_ps))
    plain = {}
    last = None
    for (method, draft_choice), batch, temperature, top_p in tqdm(grid, desc="cells"):
        name = f"{method} draft_choice={draft_choice} batch={batch} temperature={temperature} top_p={top_p}"
        if name in report["cells"]:
            continue
        if last != (method, draft_choice, batch):  # the programs of the method before are not needed any more
            last = (method, draft_choice, batch)
            jax.clear_caches()
        if (temperature, top_p) not in plain:
            plain[temperature, top_p] = run(arguments, models, tokens, PLAIN_BATCH, temperature, top_p, config=None)
        request = Request(max_new_tokens=arguments.max_new_tokens, draft_choice=draft_choice, cache_length=cache_length(arguments))
        config = method_config(method, models, tokens.tolist(), request=request)
        begin = time.perf_counter()
        results = run(arguments, models, tokens, batch, temperature, top_p, config=config)
        report["cells"][name] = {
            **compare(arguments, models, tokens, temperature, top_p, results, plain[temperature, top_p]),
            "tau": summarize([result.info for result in results], block_size=models.drafter.config.block_size).tau,
            "seconds": time.perf_counter() - begin,
        }
        write(arguments.out, report)


def run(arguments, models, tokens, batch, temperature, top_p, *, config):
    """Generations of all prompts, batch rows at a time; every prompt has a key of its own. config: None means `autoregress`."""
    keys = row_keys(jax.random.key(arguments.seed), len(tokens))
    results = []
    for first in tqdm(range(0, len(tokens), batch), desc=f"batch {batch} T {temperature} top-p {top_p}", leave=False):
        rows = np.arange(first, first + batch) % len(tokens)  # a last batch that is not full begins again
        request = {
            "config": config or DecodeConfig.autoregressive(cache_length=cache_length(arguments)),
            "sampling": make_sampling(batch, temperature=temperature, top_p=top_p),
            "max_new_tokens": arguments.max_new_tokens,
            "stop_token_ids": models.target.config.eos_token_ids,
        }
        lengths = np.full(batch, arguments.prompt_tokens, np.int32)
        door = autoregress if config is None else generate
        result = door(models, tokens[rows], lengths, keys[rows], **request)
        kept = min(batch, len(tokens) - first)
        results.append(jax.tree.map(np.asarray, result._replace(info=jax.tree.map(lambda field, kept=kept: field[:, :kept], result.info))))
    return results


def compare(arguments, models, tokens, temperature, top_p, got, expected):
    """Differences of all rows, with place and margin, and the largest gap between log-probabilities of rows that agree."""

    def rows(results, name):
        return np.concatenate([getattr(result, name) for result in results])[: len(tokens)]

    names = ("tokens", "lengths", "finish_reasons", "log_probs", "processed_log_probs")
    ours, theirs = (got[0]._replace(**{name: rows(results, name) for name in names}) for results in (got, expected))
    lengths = np.full(len(tokens), arguments.prompt_tokens)
    sampling = make_sampling(len(tokens), temperature=temperature, top_p=top_p)
    found = find_divergences(models, tokens, lengths, row_keys(jax.random.key(arguments.seed), len(tokens)), sampling, ours, theirs)
    agreeing = np.setdiff1d(np.arange(len(tokens)), [one.row for one in found])
    return {
        "rows": len(tokens),
        "tokens": int(ours.lengths.sum()),
        "differences": len(found),
        "near_ties": sum(one.is_near_tie for one in found),
        "divergences": [one._asdict() for one in found],
        "other_reasons": int((ours.finish_reasons != theirs.finish_reasons)[agreeing].sum()),
        "largest_gaps": {name: float(np.abs(getattr(ours, name) - getattr(theirs, name))[agreeing].max(initial=0)) for name in names[3:]},
    }


def compare_with_transformers(arguments):
    """Greedy rows of transformers' `generate` in float32 against `autoregress`."""
    import torch
    from transformers import AutoModelForCausalLM

    models, tokens = load_pair(arguments.pair, dtype="float32"), read_prompts(arguments)
    reference = AutoModelForCausalLM.from_pretrained(arguments.huggingface, dtype=torch.float32).eval()
    ours = [
        result.tokens[row, : result.lengths[row]].tolist()
        for result in run(arguments, models, tokens, PLAIN_BATCH, 0.0, 1.0, config=None)
        for row in range(PLAIN_BATCH)
    ][: len(tokens)]
    request = {"max_new_tokens": arguments.max_new_tokens, "stop_token_ids": models.target.config.eos_token_ids}
    theirs = [transformers_greedy(reference, row.tolist(), **request) for row in tqdm(tokens, desc="transformers")]
    found = divergences(reference, tokens.tolist(), theirs, ours)
    return {"rows": len(tokens), "differences": len(found), "divergences": [one._asdict() for one in found]}


def read_prompts(arguments):
    """The first tokens of the first stories that have as many, [prompts tokens]."""
    tokenizer = load_tokenizer(pairs.path(arguments.pair))
    found = []
    for story in json.loads(arguments.stories.read_text(encoding="utf-8")):
        ids = encode(tokenizer, story)
        if len(ids) >= arguments.prompt_tokens:
            found.append(ids[: arguments.prompt_tokens])
        if len(found) == arguments.num_prompts:
            return np.asarray(found, np.int32)
    raise SystemExit(f"{arguments.stories} holds only {len(found)} texts of {arguments.prompt_tokens} tokens or more.")


def cache_length(arguments):
    return arguments.prompt_tokens + arguments.max_new_tokens


def write(path, report):
    """Replace the file at once, so that an interruption leaves the last whole one."""
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


if __name__ == "__main__":
    main()
