"""Measure methods on benchmarks, at one temperature or several, each in a folder of its own, and sum them up as the paper does.

In: Models, a tokenizer, Tasks of each benchmark, names of methods, a Request for each folder.
Out: OUT/NAME or OUT/NAME/T0, T1, ... as `bench.measure` writes them; OUT/results.json, tables.md and benchmarks.png over all of them; of
    several drafters all this in OUT/DRAFTER, and in OUT what joins them.
Source: ReAnchor, Table 2. In the second turn of MT-Bench the model has answered the first, plainly: every method's answer is that one.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reanchor_jax.bench import charts, compare, methods, preflight, tables
from reanchor_jax.bench.benchmarks import BENCHMARKS, Task
from reanchor_jax.bench.compare import BASELINE
from reanchor_jax.bench.measure import (
    NO_CHARTS,
    check_folder,
    measure,
    request_settings,
    run_settings,
    surroundings,
    to_json,
    weights_digest,
)
from reanchor_jax.bench.methods import Request, temperature_name
from reanchor_jax.files import read_json
from reanchor_jax.models.drafter import Models
from reanchor_jax.streaming import continuation
from reanchor_jax.text import Prompt, encode_turns, pin_settings, write_text


class Chat(NamedTuple):
    """How texts become a model's prompts. is_wrapped: by the chat template. thinking: as in `text.encode_turns`."""

    tokenizer: Any
    is_wrapped: bool
    thinking: bool | None

    def prompt(self, identifier: str, turns: Sequence[str]) -> Prompt:
        """The prompt that these turns of user and model make."""
        try:
            ids = encode_turns(self.tokenizer, turns, is_chat=self.is_wrapped, thinking=self.thinking)
        except ValueError as error:
            raise ValueError(f"{identifier}: {error}") from error
        return Prompt(id=identifier, text=turns[-1], ids=ids)


def run_suite(
    models: Models,
    chat: Chat,
    tasks: Mapping[str, Sequence[Task]],
    names: Sequence[str],
    *,
    requests: Mapping[str, Request],
    out: Path,
    model_name: str,
    has_preflight: bool = False,
) -> dict[str, Any]:
    """Measure the methods on every benchmark and sum up what the folder holds, which is also returned; figures are printed.

    tasks: of each benchmark, by its name. names: autoregressive among them, and dflash with has_preflight, which also tells whether a
    longer block is worth training. requests: by the folder inside a benchmark's, "" for the benchmark's own; they differ in temperature.
    Prompts that the target cannot hold together with the new tokens are left out and counted. Raises ValueError, before anything is run,
    for methods and texts that cannot be and for other settings or prompts than a folder's.
    """
    firsts = _prepare(models, chat, tasks, names, requests=requests, out=out, model_name=model_name)
    summary = {}
    for subfolder, request in requests.items():
        runs = {}
        for name, mine in tasks.items():
            folder, title = out / name / subfolder, BENCHMARKS[name].title
            prompts, skipped = _prompts(models, chat, mine, firsts[name], request=request, folder=folder, model_name=model_name)
            told = f"{title}, temperature {temperature_name(request.temperature)}: {len(prompts)} prompts"
            if skipped:
                told += f", {len(skipped)} left out: longer than the {methods.prompt_limit(models, request)} tokens that fit"
            print(told, file=sys.stderr)
            facts = {"benchmark": name, "temperature": request.temperature, "skipped": skipped}
            if prompts:
                found = measure(models, prompts, names, request=request, out=folder, model_name=model_name, source=title, facts=facts)
                runs[title] = found.runs
            else:
                write_text(folder / "results.json", to_json({"methods": {}, "speedup": {}, "prompts": [], **facts}))
            summary = write_summary(out, model_name=model_name)
        if has_preflight:
            print(model_name, *preflight.report(runs, models=models, temperature=request.temperature), sep="\n")
    print(tables.benchmark_tables(summary, title=model_name))
    if not charts.has_matplotlib():
        print(NO_CHARTS, file=sys.stderr)
    return summary


def run_suites(
    every: Mapping[str, Models],
    chat: Chat,
    tasks: Mapping[str, Sequence[Task]],
    names: Sequence[str],
    *,
    requests: Mapping[str, Request],
    out: Path,
    model_name: str,
    has_preflight: bool = False,
) -> dict[str, Any]:
    """`run_suite` with each of several drafters of one target, in a folder of its own, and one table over all, whose summary is returned.

    every: Models by the drafter's name. What can be refused of any drafter is, before the first is run.
    """
    for models in every.values():
        _check_methods(models, names, requests)
    check_folder(out)
    titles = {name: f"{model_name} with {name}" for name in every}
    for name, models in every.items():
        _prepare(models, chat, tasks, names, requests=requests, out=out / name, model_name=titles[name])
    found = {
        name: run_suite(models, chat, tasks, names, requests=requests, out=out / name, model_name=titles[name], has_preflight=has_preflight)
        for name, models in every.items()
    }
    summary = {"model": model_name, **join_drafters(found)}
    write_text(out / "results.json", to_json(summary))
    write_text(out / "tables.md", tables.benchmark_tables(summary, title=model_name))
    print(tables.benchmark_tables(summary, title=model_name))
    return summary


def join_drafters(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Runs and means of several drafters' summaries in one, a method called by its drafter: DRAFTER, DRAFTER + ReAnchor, DRAFTER METHOD.

    Plain decoding stands there once, and a benchmark at a temperature only where every drafter has it with as many prompts; of these are
    the means.
    """

    names = {BASELINE: "{1}", compare.CHAIN: "{0}", "reanchor": "{0} + ReAnchor"}
    key = ("temperature", "benchmark", "num_prompts", "num_skipped")
    places = [{tuple(run[name] for name in key): run for run in summary["runs"]} for summary in found.values()]
    runs = []
    for place, run in places[0].items():
        if not all(place in others for others in places):
            continue
        merged: dict[str, Any] = {}
        for drafter, others in zip(found, places, strict=True):
            for method, figures in others[place]["methods"].items():
                called = names.get(method, "{0} {1}").format(drafter, method)
                merged.setdefault(called, {**figures, "folder": f"{drafter}/{others[place]['folder']}"})
        runs.append({**run, "folder": None, "methods": dict(sorted(merged.items(), key=lambda item: item[0] != BASELINE))})
    return {"runs": runs, "means": _means(runs)}


def _prepare(
    models: Models,
    chat: Chat,
    tasks: Mapping[str, Sequence[Task]],
    names: Sequence[str],
    *,
    requests: Mapping[str, Request],
    out: Path,
    model_name: str,
) -> dict[str, list[Prompt]]:
    """First prompts of every benchmark, after all that can be refused has been: methods, texts, what the folders hold."""
    _check_methods(models, names, requests)
    firsts = {name: [chat.prompt(_prompt_names(task)[0], task.turns[:1]) for task in mine] for name, mine in tasks.items()}
    check_folder(out)
    asked = {name: value for name, value in request_settings(next(iter(requests.values()))).items() if name != "temperature"}
    asked |= {"is_chat": chat.is_wrapped, "thinking": chat.thinking}
    _rows(out)  # a damaged summary of an earlier command is told now
    shared = {"model": model_name, "weights": weights_digest(models), **asked, "environment": surroundings(models)}
    pin_settings(out / "settings.json", shared)
    for subfolder, request in requests.items():
        for name, mine in tasks.items():
            _pin_prompts(models, mine, firsts[name], request=request, folder=out / name / subfolder, model_name=model_name)
    return firsts


def _check_methods(models: Models, names: Sequence[str], requests: Mapping[str, Request]) -> None:
    """Raise ValueError for methods that cannot be."""
    for request in requests.values():
        for name in names:
            methods.method_config(name, models, [[0]], request=request)


def write_summary(out: Path, *, model_name: str) -> dict[str, Any]:
    """Sum up every benchmark's results.json in a folder: as results.json, tables.md and, with matplotlib, benchmarks.png beside them.

    `runs`: a benchmark at a temperature each, in the order of temperatures and BENCHMARKS. `means`: over the benchmarks, by temperature
    and method, but for those where no answer had a second token; None for a method that some benchmark lacks.
    """
    found = sorted(_rows(out), key=lambda row: row["temperature"])
    summary = {"model": model_name, "runs": found, "means": _means(found)}
    write_text(out / "results.json", to_json(summary))
    write_text(out / "tables.md", tables.benchmark_tables(summary, title=model_name))
    charts.write_tau_chart(summary, out / "benchmarks.png")
    return summary


def _rows(out: Path) -> list[dict[str, Any]]:
    """Entries of the summary, in the order of BENCHMARKS. Raises ValueError naming a file that does not hold what `measure` writes."""
    rows = {}
    for name in BENCHMARKS:
        for path in (out / name / "results.json", *sorted((out / name).glob("T*/results.json"))):
            try:
                figures = read_json(path)
                if figures is not None and figures.get("benchmark") == name:
                    row = _row(figures, path.parent.relative_to(out).as_posix())
                    tables.benchmark_tables({"runs": [row], "means": _means([row])}, title="")  # so every figure in it can be told
                    rows[row["temperature"], name] = row
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path} is damaged; remove it and ask for {name} again: its runs stand in runs.jsonl beside it, so none is repeated."
                ) from error
    return list(rows.values())


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The means of `write_summary` over rows in the order of temperatures."""
    means = {}
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [row["methods"] for row in rows if row["temperature"] == temperature]
        mine = [methods for methods in mine if any(figures["tau"] is not None for figures in methods.values())]
        names = dict.fromkeys(name for measured in mine for name in measured)
        means[temperature_name(temperature)] = {name: {key: _mean(mine, name, key) for key in ("tau", "speedup")} for name in names}
    return means


def _prompt_names(task: Task) -> list[str]:
    return [task.id] if len(task.turns) == 1 else [f"{task.id}/{turn}" for turn in (1, 2)]


def _pin_prompts(
    models: Models, tasks: Sequence[Task], firsts: Sequence[Prompt], *, request: Request, folder: Path, model_name: str
) -> None:
    """Write a folder's settings, or compare with those it has; second turns are known only when the first are answered."""
    begun = _begun(tasks, firsts, methods.prompt_limit(models, request))
    name = "turns.json" if _has_second_turns(begun) else "settings.json"
    check_folder(folder)
    settings = run_settings(models, [first.ids for _, first in begun], request=request, model_name=model_name)
    if name == "turns.json":
        settings["second_turns"] = [task.turns[1:] for task, _ in begun]
    pin_settings(folder / name, settings)


def _begun(tasks: Sequence[Task], firsts: Sequence[Prompt], limit: int) -> list[tuple[Task, Prompt]]:
    """The tasks whose first turn fits, with it."""
    return [(task, first) for task, first in zip(tasks, firsts, strict=True) if len(first.ids) <= limit]


def _has_second_turns(begun: Sequence[tuple[Task, Prompt]]) -> bool:
    return any(len(task.turns) == 2 for task, _ in begun)


def _prompts(
    models: Models, chat: Chat, tasks: Sequence[Task], firsts: Sequence[Prompt], *, request: Request, folder: Path, model_name: str
) -> tuple[list[Prompt], list[str]]:
    """Prompts of all turns that fit, first turns first, and the names of those that do not.

    A prompt's key is folded from its index: so plain decoding gives the first turns among all prompts what it gave them alone.
    """
    limit = methods.prompt_limit(models, request)
    begun = _begun(tasks, firsts, limit)
    prompts = [first for _, first in begun]
    skipped = [name for task, first in zip(tasks, firsts, strict=True) if len(first.ids) > limit for name in _prompt_names(task)]
    if _has_second_turns(begun):
        answers = _answers(models, prompts, request=request, folder=folder, model_name=model_name)
        for (task, first), answer in zip(begun, answers, strict=True):
            text = continuation(chat.tokenizer, first.ids, answer) or ""
            second = chat.prompt(_prompt_names(task)[1], [task.turns[0], text, task.turns[1]])
            if len(second.ids) <= limit:
                prompts.append(second)
            else:
                skipped.append(second.id)
    return prompts, skipped


def _answers(models: Models, prompts: Sequence[Prompt], *, request: Request, folder: Path, model_name: str) -> list[list[int]]:
    """What plain decoding answers to the first turns; turns.jsonl holds its runs, made with the settings that `_pin_prompts` compared."""
    ids = [prompt.ids for prompt in prompts]
    runs = compare.compare(
        models,
        ids,
        {BASELINE: methods.method_config(BASELINE, models, ids, request=request)},
        request=request,
        done=compare.read_runs(folder / "turns.jsonl", num_prompts=len(ids), batch_size=request.batch_size),
        on_run=lambda run: compare.write_run(folder / "turns.jsonl", run),
        show_progress=sys.stderr.isatty(),
    )
    return [outcome.tokens for run in sorted(runs, key=lambda run: run.first) for outcome in run.outcomes]


def _row(figures: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """A benchmark's entry in the summary."""

    def method(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
        has_passes = found["target_passes"] > 0  # without any there is no tau: every answer ended at its first token
        told = {key: float(found[key]) if has_passes else None for key in ("tau", "tau_standard_error")}
        return {**told, "identical": found["identical"], "speedup": figures["speedup"][name]}

    return {
        "benchmark": figures["benchmark"],
        "temperature": float(figures["temperature"]),
        "folder": folder,
        "num_prompts": len(figures["prompts"]),
        "num_skipped": len(figures["skipped"]),
        "methods": {name: method(name, found) for name, found in figures["methods"].items()},
        "environment": figures.get("environment"),
    }


def _mean(measured: Sequence[Mapping[str, Any]], name: str, key: str) -> float | None:
    values = [figures.get(name, {}).get(key) for figures in measured]
    return None if None in values else float(np.mean(values))
