"""Compare drafters of one target, each alone and with ReAnchor, at one temperature or several, and sum them up in one table.

In: a target, drafters by name or directory, prompts.
Out: OUT/DRAFTER/T0, T1, ... as `bench.measure` writes them; OUT/results.json, tables.md and drafters.png over all of them.
Source: ReAnchor, Table 2: every kind of drafter, alone and with it. Interrupted, the same command goes on.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from reanchor_jax import checkpoint, pairs
from reanchor_jax.bench import charts, compare, tables
from reanchor_jax.bench.measure import NO_CHARTS, check_folder, measure, run_settings, to_json
from reanchor_jax.bench.methods import Request, method_config, split_names, temperature_name
from reanchor_jax.config import check_pair
from reanchor_jax.decoding.state import require_drafter
from reanchor_jax.files import read_json, settle
from reanchor_jax.models.drafter import Models
from reanchor_jax.text import load_tokenizer, pin_settings, read_prompts, write_text

_METHODS = (compare.BASELINE, compare.CHAIN, "reanchor")
_TITLE = "Drafters, alone and with ReAnchor"


def main(arguments: list[str] | None = None) -> int:
    """Measure every drafter at every temperature."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.bench.drafters", description=__doc__)
    parser.add_argument("--pair", metavar="NAME|DIR", default="stories260k", help="its target is used; default: %(default)s")
    parser.add_argument("--drafters", metavar="A,B,C", help="embedded drafters of the pair, or directories; default: all embedded ones")
    parser.add_argument("--prompts", metavar="FILE", required=True, help="JSONL file of objects with `prompt` or `ids`")
    parser.add_argument("--num-examples", metavar="N", type=int, help="the first N prompts; default: all")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--temperatures", metavar="X,Y", default="0,1", help="default: %(default)s")
    parser.add_argument(
        "--draft-choice", metavar="NAME", default="argmax", help="how drafts are chosen where rows sample; default: %(default)s"
    )
    parser.add_argument("--out", metavar="DIR", required=True, type=Path)
    args = parser.parse_args(arguments)
    try:
        if args.num_examples is not None and args.num_examples < 1:
            raise ValueError(f"--num-examples must be at least 1; got {args.num_examples}.")
        folders = find_drafters(args.pair, None if args.drafters is None else split_names(args.drafters))
        # "same output" is a promise about full products
        with jax.default_matmul_precision("highest"):
            summary = _run(args, folders)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(tables.drafter_table(summary, title=_TITLE))
    return 0


def _run(args: argparse.Namespace, folders: Mapping[str, Path]) -> dict[str, Any]:
    where = pairs.find(args.pair)
    target, tokenizer = checkpoint.load_target(where.target), load_tokenizer(where.target)
    prompts = read_prompts(args.prompts, tokenizer, vocab_size=target.config.vocab_size, limit=args.num_examples)
    requests = {}
    for value in map(float, split_names(args.temperatures)):
        given = {"temperature": value, "draft_choice": args.draft_choice, "stop_token_ids": target.config.eos_token_ids}
        requests[f"T{temperature_name(value)}"] = Request(max_new_tokens=args.max_new_tokens, **given)
    if not requests:
        raise ValueError("--temperatures names none; give numbers with commas between.")
    ids = [prompt.ids for prompt in prompts]
    every = {name: Models(target=target, drafter=checkpoint.load_drafter(folder)) for name, folder in folders.items()}
    for models in every.values():  # everything that can be refused is, before anything is run
        check_pair(target.config, require_drafter(models).config)
        for request in requests.values():
            for method in _METHODS:
                method_config(method, models, ids, request=request)
    out = settle(args.out)
    check_folder(out)
    _rows(out)  # damaged figures of an earlier command are told now
    shared = run_settings(Models(target=target, drafter=None), ids, request=next(iter(requests.values())), model_name=args.pair)
    del shared["temperature"]
    pin_settings(out / "settings.json", shared)  # the rows of one table are of one kind
    for name, models in every.items():
        for subfolder, request in requests.items():
            check_folder(out / name / subfolder)
            settings = run_settings(models, ids, request=request, model_name=f"{args.pair} with {name}")
            pin_settings(out / name / subfolder / "settings.json", settings)
    summary = {}
    for name, models in every.items():
        for subfolder, request in requests.items():
            print(f"{name}, temperature {temperature_name(request.temperature)}", file=sys.stderr)
            measure(
                models,
                prompts,
                _METHODS,
                request=request,
                out=out / name / subfolder,
                model_name=f"{args.pair} with {name}",
                source=Path(args.prompts).name,
                facts={"drafter": name, "temperature": request.temperature},
            )
        summary = write_summary(out)
    if not charts.has_matplotlib():
        print(NO_CHARTS, file=sys.stderr)
    return summary


def find_drafters(pair: str, given: Sequence[str] | None) -> dict[str, Path]:
    """Directories of drafters by name: embedded ones of a pair, all of them without names, or of given directories.

    Raises ValueError if two would have one name, FileNotFoundError as `pairs.path`.
    """
    own = {name.partition("/")[2]: name for name in pairs.names() if name.startswith(f"{pair}/")}
    found = {}
    for name in own if given is None else given:
        label = name if name in own else Path(name).resolve().name
        label = Path(name).resolve().parent.name if label == "drafter" else label  # where training puts it: RUN/drafter
        if label in found:
            raise ValueError(f"two drafters are called {label}; copy one to a directory of another name.")
        found[label] = pairs.path(own.get(name, name))
    if not found:
        raise ValueError(f"{pair} has no drafters by name; give their directories.")
    return found


def write_summary(out: Path) -> dict[str, Any]:
    """Sum up what the folders of drafters hold, and return it: results.json, tables.md and, with matplotlib, drafters.png."""
    summary = {"runs": sorted(_rows(out), key=lambda run: run["temperature"])}
    write_text(out / "results.json", to_json(summary))
    write_text(out / "tables.md", tables.drafter_table(summary, title=_TITLE))
    charts.write_tau_chart(summary, out / "drafters.png")
    return summary


def _rows(out: Path) -> list[dict[str, Any]]:
    """Runs of the summary, by folder. Raises ValueError naming a file that is damaged."""
    rows = []
    for path in sorted(out.glob("*/T*/results.json")):
        try:
            figures = read_json(path) or {}
            if "drafter" in figures:  # other commands write files of that name too
                row = {key: figures[key] for key in ("drafter", "temperature", "methods", "speedup", "identical", "environment")}
                tables.drafter_table({"runs": [row]}, title="")  # so every figure in it can be told
                rows.append(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged; remove it and ask for that drafter again: its runs stand in runs.jsonl beside it, so none is repeated."
            ) from error
    return rows


if __name__ == "__main__":
    sys.exit(main())
