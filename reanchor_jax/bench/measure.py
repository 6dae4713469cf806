"""Measure methods over one set of prompts in a folder of its own, and go on there after an interruption.

In: Models, Prompts, names of methods, a Request, a folder.
Out: results.json, tables.md and charts in that folder, the same figures as a dict, and the Runs behind them.
Source: none; it joins the rooms of bench. In the folder, runs.jsonl holds every run and settings.json what the runs share.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax import checkpoint
from reanchor_jax.bench import charts, compare, methods, peers, tables, traces
from reanchor_jax.bench.compare import Run
from reanchor_jax.bench.methods import Request
from reanchor_jax.files import check_writable, read_json
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.text import Prompt, pin_settings, write_text

NO_CHARTS = "no charts: they need matplotlib; install the extra bench (pip install '.[bench]')"


class Measured(NamedTuple):
    """What `measure` found. figures: as written to results.json. runs: of every method in them."""

    figures: dict[str, Any]
    runs: list[Run]


def measure(
    models: Models,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    *,
    request: Request,
    out: Path,
    model_name: str,
    source: str,
    traced: str | None = None,
    others: Mapping[str, Callable[[int], Run]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Measured:
    """Run the methods over the prompts, as far as the folder does not hold their runs yet, and write and print the figures of all its runs.

    source: where the prompts are from, for titles. traced: a method whose proposals are counted. others: as in `compare.compare`.
    facts: what else results.json is to say. Raises ValueError, before anything is run, for a method that cannot be and other settings.
    """
    names, others, ids = list(names), others or {}, [prompt.ids for prompt in prompts]
    configs = {name: methods.method_config(name, models, ids, request=request) for name in names}
    traced_configs = {name: methods.method_config(name, models, ids, request=request) for name in ([] if traced is None else [traced])}
    for name, config in traced_configs.items():
        if not config.is_speculative:
            raise ValueError(f"--traces {name}: plain decoding proposes nothing; name a method that drafts.")
    check_folder(out)
    pin_settings(out / "settings.json", run_settings(models, ids, request=request, model_name=model_name))
    if request.schedule is not None:  # a file of its own: a run without the method may be resumed with it
        pin_settings(out / "schedule.json", asdict(request.schedule))
    if others:
        pin_settings(out / "peers.json", peers.versions())
    found = compare.read_runs(out / "runs.jsonl", num_prompts=len(ids), batch_size=request.batch_size)
    # methods that an earlier command has finished stay in the tables
    num_runs = -(-len(ids) // request.batch_size)
    kept = [name for name in dict.fromkeys(run.method for run in found) if _count(found, name) == num_runs and name not in others]
    names += [name for name in kept if name not in names and not peers.is_peer(name)]
    configs |= {name: methods.method_config(name, models, ids, request=request) for name in names if name not in configs}
    done = [run for run in found if run.method in {*names, *others, *kept}]
    if done:
        num_asked = len({*names, *others, *kept}) * num_runs
        print(f"{len(done)} of {num_asked} runs were measured before and are not repeated", file=sys.stderr)
    runs = compare.compare(
        models,
        ids,
        configs,
        request=request,
        others=others,
        done=done,
        on_run=lambda run: compare.write_run(out / "runs.jsonl", run),
        show_progress=sys.stderr.isatty(),
    )
    measured_with = read_json(out / "peers.json") or {}
    figures = peers.split_figures(compare.results(models, ids, runs, request=request), measured_with)
    title = f"{model_name}, {len(prompts)} prompts of {source}, temperature {methods.temperature_name(request.temperature)}"
    text = tables.markdown_tables(figures, title=title)
    for name, config in traced_configs.items():
        counted = traces.trace_statistics(models, ids, config, request=request, show_progress=sys.stderr.isatty())
        figures["traces"] = {name: counted}
        text += "\n".join([*traces.statistics_lines(counted, method=name), ""])
    figures |= {"prompts": [prompt.id for prompt in prompts], **(facts or {})}
    write_text(out / "results.json", to_json(figures))
    write_text(out / "tables.md", text)
    block_size = 1 if models.drafter is None else models.drafter.config.block_size
    written = [out / "results.json", out / "tables.md", *charts.write_charts(figures, out, block_size=block_size)]
    print(tables.terminal_table(figures))
    print(*tables.peer_lines(figures), *tables.divergence_lines(figures), f"written: {', '.join(map(str, written))}", sep="\n")
    if not charts.has_matplotlib() and len(names) > 1:
        print(NO_CHARTS, file=sys.stderr)
    return Measured(figures=figures, runs=runs)


def check_folder(out: Path) -> None:
    """Make a folder of figures. Raises OSError naming the file, before the work and not after it, if they cannot be written there."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("results.json", "tables.md", "runs.jsonl"):
        check_writable(out / name)


def run_settings(models: Models, prompts: Sequence[Sequence[int]], *, request: Request, model_name: str) -> dict[str, Any]:
    """What every run of a folder shares. The methods are not among it: a run may be resumed with one more."""
    return {"model": model_name, "weights": weights_digest(models), "prompts": prompts, **request_settings(request)} | {
        "environment": surroundings(models)
    }


def weights_digest(models: Models) -> dict[str, str | None]:
    """Names of the target and the drafter: other weights or another config have another, whatever they are called. None: no drafter.

    One reduction a leaf, where the leaf lies: together they take about as long as decoding one token.
    """

    def digest(part: Target | Drafter) -> str:
        sums = sorted((path, int(value)) for path, value in _sums_of_bits(checkpoint.leaves(part)).items())
        # the same weights draft otherwise with another block size
        return hashlib.sha256(f"{part.config!r} {json.dumps(sums)}".encode()).hexdigest()

    return {"target": digest(models.target), "drafter": None if models.drafter is None else digest(models.drafter)}


@jax.jit
def _sums_of_bits(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Of each leaf the sum of the numbers that its bits are, each times an odd number of its own, modulo 2^32."""

    def total(leaf):
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]
        bits = jax.lax.bitcast_convert_type(leaf.reshape(-1), kind).astype(jnp.uint32)
        bits ^= bits >> 16  # of float32 that was bfloat16 the low half is empty, where alone small factors tell places apart
        return jnp.sum(bits * (2 * jax.lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)

    return {path: total(leaf) for path, leaf in leaves.items()}


def request_settings(request: Request) -> dict[str, Any]:
    """The fields of a request but its schedule, which is a method's own affair."""
    return {name: value for name, value in asdict(request).items() if name != "schedule"}


def surroundings(models: Models) -> dict[str, Any]:
    """`compare.environment` without the date."""
    return {name: value for name, value in compare.environment(models).items() if name != "date"}


def to_json(value: Any) -> str:
    """The text of a JSON file of figures."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _count(runs: Sequence[Run], method: str) -> int:
    return sum(run.method == method for run in runs)
