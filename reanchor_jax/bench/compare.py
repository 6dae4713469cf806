"""Run methods side by side on the same prompts, weights and keys, and time them.

In: Models, prompts, a DecodeConfig for each method, a Request.
Out: Runs (one batch by one method), and a JSON dict of figures: tau, tokens per second, speedup, whether outputs are identical.
Source: ReAnchor, Experiments. Prefill and decoding are two compiled programs, timed apart; the decoding of a batch is one call without
    host work in it. Compilation happens in a warm-up before. Methods take turns batch by batch, so that a slow minute hits all alike.
"""

import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from reanchor_jax.bench.methods import Outcome, Request, begin, outcomes, run_rounds, step_info
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.sampling import filter_logits, position_noise, row_keys
from reanchor_jax.decoding.state import FINISH_REASONS
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.models.drafter import Models
from reanchor_jax.models.target import Target
from reanchor_jax.statistics import ROUND_FIELDS, summarize, tau_per_prompt

BASELINE = "autoregressive"
CHAIN = "dflash"

_LINE_START = b'{"method":'
_LARGEST_COUNT = 1 << 22  # of ids and of a round's tokens and nodes: above every vocabulary, and small enough for a histogram


class Run(NamedTuple):
    """One batch by one method.

    first: index of the batch's first prompt. warmup_seconds: compilation and a first call, at a method's first run of a process, else 0.
    prefill_seconds: until the first token. decode_seconds: all rounds after it.
    """

    method: str
    first: int
    warmup_seconds: float
    prefill_seconds: float
    decode_seconds: float
    outcomes: list[Outcome]


def compare(
    models: Models,
    prompts: Sequence[Sequence[int]],
    configs: Mapping[str, DecodeConfig],
    *,
    request: Request,
    others: Mapping[str, Callable[[int], Run]] | None = None,
    done: Sequence[Run] = (),
    on_run: Callable[[Run], None] = lambda run: None,
    show_progress: bool = True,
) -> list[Run]:
    """Run every method over every batch of prompts; methods take turns.

    others: what is not ours, by name: it makes the run of the batch that begins at a prompt.
    done: runs of an earlier call, which are not repeated; on_run sees each new one.
    """
    runs, others = list(done), others or {}
    finished = {(run.method, run.first) for run in runs}
    names = [*configs, *others]
    todo = []
    for turn, first in enumerate(range(0, len(prompts), request.batch_size)):
        shift = turn % len(names)
        todo += [(name, first) for name in names[shift:] + names[:shift] if (name, first) not in finished]
    with tqdm(total=len(todo), unit="run", disable=not show_progress, leave=False) as progress:

        def run(name: str, first: int, warmup_seconds: float) -> Run:
            if name in others:
                return others[name](first)._replace(warmup_seconds=warmup_seconds)
            indices = range(first, min(first + request.batch_size, len(prompts)))
            config = configs[name]
            start = time.perf_counter()
            state, begun = jax.block_until_ready(begin(models, prompts, indices, config=config, request=request))
            middle = time.perf_counter()
            state, info = jax.block_until_ready(run_rounds(models, state, config=config, request=request))
            end = time.perf_counter()
            return Run(
                method=name,
                first=first,
                warmup_seconds=warmup_seconds,
                prefill_seconds=middle - start,
                decode_seconds=end - middle,
                outcomes=outcomes(begun, info, state, len(indices)),
            )

        warmups = {}
        for name in dict.fromkeys(name for name, _ in todo):
            progress.set_description(f"compiling {name}")
            start = time.perf_counter()
            run(name, 0, 0.0)
            warmups[name] = time.perf_counter() - start
        for name, first in todo:
            progress.set_description(name)
            runs.append(run(name, first, warmups.pop(name, 0.0)))
            on_run(runs[-1])
            progress.update()
    return runs


def results(models: Models, prompts: Sequence[Sequence[int]], runs: Sequence[Run], *, request: Request) -> dict[str, Any]:
    """Figures of all runs as a JSON dict: `methods`, `identical`, `speedup`, `environment`. The runs must include autoregressive's.

    Tokens and seconds are of decoding alone, the prefill and its token excluded. speedup: seconds per token of autoregressive over the
    method's. gain_over_chain: of tau over the method dflash, paired by prompt, where dflash is among the methods. divergences: where a
    method's output first differs from autoregressive, with the margin by which the target preferred its choice there, in logits (at
    temperature > 0: after filters, with noise).
    """
    block_size = models.drafter.config.block_size if models.drafter is not None else 1
    by_method: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.first):
        by_method.setdefault(run.method, []).append(run)
    expected = [outcome.tokens for run in by_method[BASELINE] for outcome in run.outcomes]
    methods, speedup = {}, {}
    for name, mine in by_method.items():
        found = [outcome for run in mine for outcome in run.outcomes]
        seconds = sum(run.decode_seconds for run in mine)
        num_tokens = sum(sum(outcome.rounds["num_emitted"]) for outcome in found)
        summary = summarize([step_info(outcome) for outcome in found], block_size=1 if name == BASELINE else block_size)
        rate = num_tokens / seconds if num_tokens and seconds > 0 else None
        divergences = []
        for index, (outcome, tokens) in enumerate(zip(found, expected, strict=True)):
            if outcome.tokens != tokens:
                place = next((i for i, (a, b) in enumerate(zip(outcome.tokens, tokens, strict=False)) if a != b), len(tokens))
                margin = top2_margin(models, [*prompts[index], *tokens[:place]], index, request=request)
                divergences.append({"prompt": index, "index": place, "margin": margin})
        methods[name] = {
            **summary._asdict(),
            "tokens": num_tokens,
            "tokens_per_second": rate,
            "prefill_seconds": sum(run.prefill_seconds for run in mine),
            "warmup_seconds": sum(run.warmup_seconds for run in mine),
            "identical": not divergences,
            "divergences": divergences,
        }
    if CHAIN in methods:
        chain = _taus(by_method[CHAIN])
        for name, figures in methods.items():
            figures["gain_over_chain"] = paired_gain(_taus(by_method[name]), chain)
    for name, figures in methods.items():
        rates = figures["tokens_per_second"], methods[BASELINE]["tokens_per_second"]
        speedup[name] = rates[0] / rates[1] if None not in rates else None
    return {
        "methods": methods,
        "identical": all(figures["identical"] for figures in methods.values()),
        "speedup": speedup,
        "environment": environment(models),
    }


def paired_gain(taus: np.ndarray, base: np.ndarray) -> dict[str, float] | None:
    """Mean difference in tokens per pass over the prompts that have both, its standard error, and its share of the base's mean.

    None if no prompt has both.
    """
    difference = taus - base
    is_both = ~np.isnan(difference)
    count = int(is_both.sum())
    if not count:
        return None
    mean = float(difference[is_both].mean())
    error = float(difference[is_both].std(ddof=1) / np.sqrt(count)) if count > 1 else 0.0
    return {"mean": mean, "standard_error": error, "relative": mean / float(base[is_both].mean())}


def _taus(runs: Sequence[Run]) -> np.ndarray:
    return tau_per_prompt([step_info(outcome) for run in runs for outcome in run.outcomes])


def top2_margin(models: Models, ids: Sequence[int], index: int, *, request: Request) -> float:
    """By how much the target's first choice behind ids beats its second; index: of the prompt, whose noise it is."""
    tokens = jnp.asarray([ids], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    scores = _last_logits(models.target, tokens, positions)
    if request.temperature > 0:
        keys = row_keys(jax.random.fold_in(jax.random.key(request.seed), index)[None], 1)
        noise = position_noise(keys, jnp.asarray([[len(ids)]], jnp.int32), vocab_size=scores.shape[-1])
        scores = filter_logits(scores, request.sampling(1)) + noise
    top, _ = jax.lax.top_k(scores[0, 0], 2)
    return float(top[0] - top[1]) if np.isfinite(top[1]) else float(np.finfo(np.float32).max)


@jax.jit
def _last_logits(target: Target, tokens: Int[Array, "1 T"], positions: Int[Array, "1 T"]) -> Float[Array, "1 1 V"]:
    states = target(tokens, positions, prompt_mask(tokens.shape[1])).states[:, -1:]
    return target.logits(states).astype(jnp.float32)


def environment(models: Models) -> dict[str, Any]:
    """What the figures depend on: versions, device, cores, dtype; and the date."""
    device = jax.devices()[0]
    return {
        "versions": {name: importlib.metadata.version(name) for name in ("reanchor-jax", "jax", "jaxlib", "flax")},
        "python": platform.python_version(),
        "device": device.device_kind if device.platform != "cpu" else _processor(),
        "platform": device.platform,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "dtype": models.target.embedding.embedding[...].dtype.name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_run(path: Path, run: Run) -> None:
    """Append a run to a JSONL file."""
    record = {**run._asdict(), "outcomes": [outcome._asdict() for outcome in run.outcomes]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_runs(path: Path, *, num_prompts: int, batch_size: int) -> list[Run]:
    """Read the runs of a JSONL file over so many prompts, none if it is missing. A last line that was cut off is removed from the file.

    Raises ValueError naming the line that is not a run, or that repeats one.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    *lines, rest = content.split(b"\n")
    if not rest.startswith(_LINE_START[: len(rest)]):
        lines, rest = [*lines, rest], b""  # nothing that `write_run` began
    runs, seen = [], set()
    for number, line in enumerate(lines, start=1):
        try:
            run = _read_run(json.loads(line.decode("utf-8")), num_prompts, batch_size)
            if (run.method, run.first) in seen:
                raise ValueError(f"it repeats the run of {run.method} at prompt {run.first}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number} is not a run ({error}); delete that line or choose another --out.") from error
        seen.add((run.method, run.first))
        runs.append(run)
    if rest:
        with path.open("r+b") as file:
            file.truncate(len(content) - len(rest))
    return runs


def _read_run(record: Any, num_prompts: int, batch_size: int) -> Run:
    """Build the Run of a record. Raises ValueError telling what is wrong with it."""
    _require(isinstance(record, dict) and record.keys() == set(Run._fields), f"it must be an object of {', '.join(Run._fields)}")
    method, first, found = record["method"], record["first"], record["outcomes"]
    _require(isinstance(method, str), "method must be a name")
    _require(type(first) is int and first in range(0, num_prompts, batch_size), "first must be where a batch of the prompts begins")
    for name in ("warmup_seconds", "prefill_seconds", "decode_seconds"):
        _require(type(record[name]) in (int, float) and 0 <= record[name] < math.inf, f"{name} must be a number of at least 0")
    count = min(batch_size, num_prompts - first)
    _require(isinstance(found, list) and len(found) == count, f"outcomes must be a list of {count}, one a prompt")
    for outcome in found:
        _require(isinstance(outcome, dict) and outcome.keys() == set(Outcome._fields), "an outcome must hold tokens, finish_reason, rounds")
        tokens, rounds = outcome["tokens"], outcome["rounds"]
        _require(_are_counts(tokens), "tokens must be ids")
        _require(outcome["finish_reason"] in FINISH_REASONS, "finish_reason must be a known one")
        _require(isinstance(rounds, dict) and rounds.keys() == set(ROUND_FIELDS), f"rounds must be an object of {', '.join(ROUND_FIELDS)}")
        _require(all(_are_counts(values) for values in rounds.values()), "rounds must hold lists of counts")
        _require(len({len(values) for values in rounds.values()}) == 1, "the lists of rounds must be equally long")
        _require(len(tokens) == 1 + sum(rounds["num_emitted"]), "tokens must be one more than those emitted in rounds")
    return Run(**{**record, "outcomes": [Outcome(**outcome) for outcome in found]})


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _LARGEST_COUNT for value in values)


def _processor() -> str:
    """Name of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
