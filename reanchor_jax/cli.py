"""Command line: `reanchor-jax demo | generate | bench | profile | convert | train | inspect`.

In: arguments.
Out: text on standard output, progress on standard error, JSON and Markdown files; exit status 0, 2 for a user's error, 130 for Ctrl-C.
Source: none; each command only joins the rooms.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from reanchor_jax import checkpoint, inspection, pairs
from reanchor_jax.arguments import make_parser, read_fields
from reanchor_jax.bench import benchmarks, charts, compare, demo, doctor, measure, methods, peers, preflight, profiles, suite, tables
from reanchor_jax.bench.drafters import find_drafters
from reanchor_jax.bench.methods import Outcome, Request
from reanchor_jax.config import check_pair

# convert/ is a package of its own until it is installed, so a type checker may not find it
from reanchor_jax.convert import __main__ as convert_command  # pyright: ignore[reportMissingImports]
from reanchor_jax.convert.engine import convert  # pyright: ignore[reportMissingImports]
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.files import check_writable, error_text, settle
from reanchor_jax.generator import MOST_CACHED, Generator
from reanchor_jax.mapping import map_prompts
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import tau_per_prompt
from reanchor_jax.streaming import continuation, stream_text
from reanchor_jax.text import Prompt, encode, load_tokenizer, read_prompts, read_texts, write_text
from reanchor_jax.training.placement import make_mesh
from reanchor_jax.training.recipe import RolloutConfig, make_drafter
from reanchor_jax.training.settings import NO_RECIPE, read_recipe
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig


class Loaded(NamedTuple):
    """What --pair or --target name. name: for titles; tokenizer: None if the directory has none."""

    name: str
    models: Models
    tokenizer: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. A user's error is one line on standard error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue] - a terminal without the histogram's bars
    try:
        args = make_parser(COMMANDS, convert_command.add_arguments).parse_args(arguments)
        # float32 is to mean float32: in TF32 a wide pass and a one-token pass choose differently more often
        with jax.default_matmul_precision("highest"):
            status = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"reanchor-jax: error: {error_text(error)}", file=sys.stderr)
        return 2
    return status or 0


def _demo(args: argparse.Namespace) -> None:
    _check_writable(args.json)
    figures = demo.run(args.pair)
    if args.json is not None:
        _write(args.json, measure.to_json(figures))


def _inspect(args: argparse.Namespace) -> None:
    if args.batch is not None and args.context is None:
        raise ValueError(f"--batch ({args.batch}) goes with --context; give the tokens that a row must hold.")
    path, drafter = pairs.find(args.directory)
    drafter = None if drafter == path else drafter
    memory = None
    if args.context is not None:
        memory = inspection.describe_memory(path, drafter=drafter, batch=args.batch or 1, context=args.context)
    print(inspection.describe(path, drafter=drafter))
    if memory is not None:
        print(memory)
    if args.verify:
        num_files = sum(checkpoint.check_content(folder) for folder in (path, drafter) if folder is not None)
        print(f"verified: {num_files} weights files are as they were written" if num_files else "not verified: no checksums were recorded")


def _generate(args: argparse.Namespace) -> None:
    _check_writable(args.json, prompts=args.prompts)
    loaded = _load(args)
    if args.prompts is not None:
        prompts = _read_prompts(args, loaded)
    else:
        prompts = [Prompt(id="0", text=args.prompt, ids=encode(loaded.tokenizer, args.prompt, is_chat=args.chat))]
    request = _request(args, loaded.models)
    method = args.method
    if method is None:
        method = "autoregressive" if loaded.models.drafter is None else methods.SCHEDULED if args.profile else "reanchor"
    if args.profile is not None and method != methods.SCHEDULED:
        raise ValueError(f"--profile belongs to the method scheduled; got the method {method}.")
    if args.retain is not None and method.partition(":")[0] != "reanchor":
        raise ValueError(f"--retain belongs to the method reanchor; got the method {method}.")
    ids = [prompt.ids for prompt in prompts]
    config = methods.method_config(method, loaded.models, ids, request=request)
    if args.json is None and len(prompts) == 1 and loaded.tokenizer is not None:
        _stream(loaded, ids, config, request)
        return
    records = []
    for first in range(0, len(prompts), request.batch_size):
        indices = range(first, min(first + request.batch_size, len(prompts)))
        state, begun = methods.begin(loaded.models, ids, indices, config=config, request=request)
        state, info = methods.run_rounds(loaded.models, state, config=config, request=request)
        for index, outcome in zip(indices, methods.outcomes(begun, info, state, len(indices)), strict=True):
            record = _record(prompts[index], outcome, loaded.tokenizer)
            records.append(record)
            if args.json is None:
                print(f"── {record['id']}\n{record['text'] if record['text'] is not None else record['tokens']}", flush=True)
                print(_figures(outcome), file=sys.stderr)
    if args.json is not None:
        _write(args.json, measure.to_json({"results": records}))


def _stream(loaded: Loaded, ids: list[list[int]], config: DecodeConfig, request: Request) -> None:
    last = []

    def new_tokens():
        for outcome in methods.stream(loaded.models, ids, 0, config=config, request=request):
            num_seen = len(last[0].tokens) if last else 0
            last[:] = [outcome]
            yield outcome.tokens[num_seen:]

    for piece in stream_text(loaded.tokenizer, ids[0], new_tokens()):
        print(piece, end="", flush=True)
    print(flush=True)
    print(_figures(last[0]), file=sys.stderr)


def _record(prompt: Prompt, outcome: Outcome, tokenizer: Any) -> dict[str, Any]:
    """A prompt's entry in the JSON of `generate`."""
    num_passes = len(outcome.rounds["num_emitted"])
    return {
        "id": prompt.id,
        "prompt": prompt.text,
        "text": continuation(tokenizer, prompt.ids, outcome.tokens),
        "tokens": outcome.tokens,
        "acceptance_lengths": outcome.rounds["num_emitted"],
        "finish_reason": outcome.finish_reason,
        "tau": float(tau_per_prompt([methods.step_info(outcome)])[0]) if num_passes else None,
        "target_passes": num_passes,
    }


def _figures(outcome: Outcome) -> str:
    num_passes = len(outcome.rounds["num_emitted"])
    tau = f", {sum(outcome.rounds['num_emitted']) / num_passes:.2f} tokens a pass" if num_passes else ""
    return f"[{len(outcome.tokens)} tokens, {num_passes} target passes{tau}, ended by {outcome.finish_reason}]"


def _bench(args: argparse.Namespace) -> None:
    names = list(dict.fromkeys([compare.BASELINE, *methods.split_names(args.methods)]))
    if args.retain is not None and not any(name.partition(":")[0] == "reanchor" for name in [*names, args.traces or ""]):
        raise ValueError(f"--retain belongs to the method reanchor; got the methods {', '.join(names)}.")
    if args.profile is not None and methods.SCHEDULED not in [*names, args.traces]:
        names.append(methods.SCHEDULED)
    if args.preflight and compare.CHAIN not in names:
        names.append(compare.CHAIN)
    if args.benchmarks is not None:
        _bench_suite(args, names)
        return
    if given := [
        f"--{name.replace('_', '-')}"
        for name in ("benchmark_dir", "temperatures", "thinking", "drafters")
        if getattr(args, name) is not None
    ]:
        raise ValueError(f"{', '.join(given)} goes with --benchmarks.")
    loaded = _load(args)
    prompts = _read_prompts(args, loaded, limit=args.num_examples)
    request = _request(args, loaded.models)
    source = Path(args.prompts).name
    for name in names:  # before a peer is imported
        methods.method_config(name, loaded.models, [prompt.ids for prompt in prompts], request=request)
    found = measure.measure(
        loaded.models,
        prompts,
        names,
        request=request,
        out=settle(Path(args.out)),
        model_name=loaded.name,
        source=source,
        traced=args.traces,
        others=_load_peers(args, [prompt.ids for prompt in prompts], request),
    )
    if args.preflight:
        print(*preflight.report({source: found.runs}, models=loaded.models, temperature=request.temperature), sep="\n")


def _bench_suite(args: argparse.Namespace, names: list[str]) -> None:
    if args.traces is not None or args.peers:
        raise ValueError("--traces and --peers go with --prompts.")
    if args.temperatures is not None and args.temperature != 0:
        raise ValueError("give either --temperature or --temperatures.")
    wanted = methods.split_names(args.benchmarks)
    benchmarks.check_names(wanted)
    if args.drafters is not None and args.pair is None:
        raise ValueError("--drafters goes with --pair: drafters of its target, by name or directory.")
    loaded, every = (_load(args), {}) if args.drafters is None else _load_drafters(args)
    several = args.temperatures or ()
    temperatures = {f"T{methods.temperature_name(value)}": value for value in several} or {"": args.temperature}
    # they are the same for every drafter, but a profile is of one kind of drafter and refuses others
    requests = [
        {folder: _request(args, models, temperature=value) for folder, value in temperatures.items()}
        for models in every.values() or [loaded.models]
    ]
    drawn = {name: benchmarks.draw(benchmarks.read_tasks(name, args.benchmark_dir), args.num_examples, seed=args.seed) for name in wanted}
    chat = suite.Chat(
        tokenizer=loaded.tokenizer,
        is_wrapped=args.chat or bool(getattr(loaded.tokenizer, "chat_template", None)),
        thinking=None if args.thinking is None else args.thinking == "on",
    )
    asked = {"requests": requests[0], "out": settle(Path(args.out)), "model_name": loaded.name, "has_preflight": args.preflight}
    if every:
        suite.run_suites(every, chat, drawn, names, **asked)
    else:
        suite.run_suite(loaded.models, chat, drawn, names, **asked)


def _map(args: argparse.Namespace) -> None:
    _check_writable(args.out, prompts=args.prompts, flag="--out")
    loaded = _load(args)
    method = args.method or ("autoregressive" if loaded.models.drafter is None else "reanchor")
    names = {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed"}
    limit = min(loaded.models.target.config.max_positions, MOST_CACHED)
    request = Request(**{name: getattr(args, name) for name in names}, cache_length=args.cache_length or limit)
    config = methods.method_config(method, loaded.models, [[0]], request=request)
    sampling = {} if request.temperature == 0 else {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    told = map_prompts(
        Generator(loaded.models, tokenizer=loaded.tokenizer, config=config),
        args.prompts,
        args.out,
        batch_size=args.batch_size,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        stop_strings=args.stop or None,
        do_sample=request.temperature > 0,
        **sampling,
    )
    failed = f", {told.num_failed} could not be completed (their lines say why)" if told.num_failed else ""
    tau = f", {(told.num_tokens - told.num_new + told.num_failed) / told.num_passes:.2f} tokens a pass" if told.num_passes else ""
    print(f"written: {args.out}, {told.num_rows} lines, {told.num_new} of them now: {told.num_tokens} tokens{tau}{failed}")


def _doctor(args: argparse.Namespace) -> int:
    """Exit status 1 where the pair is not well."""
    loaded = _load(args)
    if args.prompts is not None:
        ids = [prompt.ids for prompt in _read_prompts(args, loaded, limit=args.num_examples)]
    elif args.chat:
        raise ValueError("--chat goes with --prompts.")
    else:
        begin = getattr(loaded.tokenizer, "bos_token_id", None)
        ids = doctor.sampled_prompts(loaded.models, 0 if begin is None else begin)
    report = doctor.examine(
        loaded.models,
        ids,
        tokenizer=loaded.tokenizer,
        floor=args.floor,
        max_new_tokens=args.max_new_tokens,
        show_progress=sys.stderr.isatty(),
    )
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    print(*doctor.report_lines(report, has_template=has_template, is_chat=args.chat), sep="\n")
    return 0 if report.is_well else 1


def _profile(args: argparse.Namespace) -> None:
    _check_writable(args.out, prompts=args.prompts, flag="--out")
    config = read_fields(args, profiles.ProfileConfig)
    loaded = _load(args)
    ids = [prompt.ids for prompt in _read_prompts(args, loaded)]
    profile = profiles.measure_profile(loaded.models, ids, config=config, show_progress=sys.stderr.isatty())
    profiles.write_profile(args.out, profile)
    for rows, arms in zip(profile.rows, profile.arms, strict=True):
        print(tables.profile_table(rows, profile.contexts, arms, kept=[profile.schedule(rows, t).arms for t in (0.0, 1.0)]))
    print(f"written: {args.out}")


def _train(args: argparse.Namespace) -> None:
    loaded = _load(args)
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, so its texts cannot be read; add tokenizer.json to the directory.")
    if args.mesh is not None and len(args.mesh) != 2:
        raise ValueError(f"--mesh takes two numbers, as 4,2 for 8 devices; got {len(args.mesh)}.")
    mesh = None if args.mesh is None else make_mesh(*args.mesh)
    recipe = read_recipe(args.recipe) if args.recipe else NO_RECIPE
    rollout_config, config = read_fields(args, RolloutConfig, **recipe.rollouts), read_fields(args, TrainConfig, **recipe.training)
    mask = recipe.drafter.get("mask_token_id") if args.mask_token_id is None else args.mask_token_id
    if mask is None:
        candidates = (getattr(loaded.tokenizer, f"{name}_token_id", None) for name in ("mask", "unk", "pad"))
        mask = next((token for token in candidates if token is not None), None)
        if mask is None:
            raise ValueError(
                "the tokenizer names no mask, unknown or padding token; give --mask-token-id, an id that never occurs in text."
            )
    shape = read_fields(args, DrafterShape, **recipe.drafter | {"mask_token_id": mask})
    start = recipe.start if args.start is None else args.start
    sources = {
        "target": loaded.name.partition("/")[0],
        "texts": Path(args.prompts).name,
        "recipe": recipe.name,
        "start": start if start is None or start in pairs.names() else Path(start).name,
    }
    written = make_drafter(
        loaded.models.target,
        read_texts(args.prompts),
        lambda text: encode(loaded.tokenizer, text, is_chat=rollout_config.is_chat),
        rollout_config=rollout_config,
        shape=shape,
        config=config,
        out=settle(Path(args.out)),
        sources={name: value for name, value in sources.items() if value},
        start=None if start is None else checkpoint.load_drafter(pairs.path(start)),
        mesh=mesh,
    )
    chart = charts.write_training_chart(written.parent)
    print(f"written: {written}" + ("" if chart is None else f", {chart}"))
    with_target = f"--pair {args.pair}" if args.pair is not None else f"--target {args.target}"
    print(f"join it with its target: reanchor-jax convert {with_target} --drafter {written} --out DIR")


def _load_peers(args: argparse.Namespace, ids: list[list[int]], request: Request) -> dict[str, Any]:
    names = methods.split_names(args.peers)
    if not names:
        return {}
    if args.pair is None or args.dtype is not None:
        raise ValueError("--peers goes with --pair, and without --dtype: a peer gets the weights of the pair as they are stored.")
    return peers.load_peers(names, args.pair, ids, request=request)


def _load(args: argparse.Namespace) -> Loaded:
    """Load what --pair, or --target and --drafter, name; a Hugging Face directory is converted into a temporary one on the way."""
    dtype = getattr(args, "dtype", None)
    drafter = getattr(args, "drafter", None)
    if args.pair is not None:
        if drafter is not None:
            raise ValueError("--drafter goes with --target; a pair has its own drafter.")
        where = pairs.find(args.pair)
        name = args.pair if args.pair in pairs.names() else where.target.resolve().name
        return Loaded(name, pairs.load_pair(args.pair, dtype=dtype), load_tokenizer(where.target))
    directory = Path(args.target)
    sources = [directory, *([] if drafter is None else [Path(drafter)])]
    missing = [source for source in sources if not source.is_dir()]
    if missing:
        raise FileNotFoundError(f"{missing[0]} is not a directory; give the directory of a model.")
    is_ours = [checkpoint.is_directory_of_ours(source) for source in sources]
    if all(is_ours):
        models = Models(target=checkpoint.load_target(directory, dtype=dtype), drafter=None)
        if drafter is not None:
            loaded = checkpoint.load_drafter(drafter, dtype=dtype)
            check_pair(models.target.config, loaded.config)
            models = models._replace(drafter=loaded)
    else:
        with tempfile.TemporaryDirectory(prefix="reanchor-jax-") as folder:
            print("converting for this run only; `reanchor-jax convert` keeps the result", file=sys.stderr)
            fresh = convert(
                None if is_ours[0] else directory,
                drafter,
                Path(folder) / "pair",
                pair=directory if is_ours[0] else None,
                dtype=dtype,
                show_progress=sys.stderr.isatty(),
            )
            assert fresh is not None
            models = checkpoint.load(fresh)
    return Loaded(directory.resolve().name, models, load_tokenizer(directory))


def _load_drafters(args: argparse.Namespace) -> tuple[Loaded, dict[str, Models]]:
    """Load the target of --pair, and its Models with each of --drafters, by the drafter's name."""
    if args.drafter is not None:
        raise ValueError("give either --drafter or --drafters.")
    where = pairs.find(args.pair)
    folders = find_drafters(args.pair, methods.split_names(args.drafters))
    target, every = checkpoint.load_target(where.target, dtype=args.dtype), {}
    for name, folder in folders.items():
        drafter = checkpoint.load_drafter(folder, dtype=args.dtype)
        check_pair(target.config, drafter.config)
        every[name] = Models(target=target, drafter=drafter)
    name = args.pair.partition("/")[0] if args.pair in pairs.names() else where.target.resolve().name
    return Loaded(name, Models(target=target, drafter=None), load_tokenizer(where.target)), every


def _request(args: argparse.Namespace, models: Models, *, temperature: float | None = None) -> Request:
    names = {field.name for field in dataclasses.fields(Request)} - {"stop_token_ids", "schedule"}
    stops = () if args.ignore_eos else models.target.config.eos_token_ids
    request = Request(**{name: getattr(args, name) for name in names}, stop_token_ids=stops)
    if temperature is not None:
        request = dataclasses.replace(request, temperature=temperature)
    if args.profile is None:
        return request
    profile = profiles.read_profile(args.profile, models)
    return dataclasses.replace(request, schedule=profile.schedule(request.batch_size, request.temperature))


def _read_prompts(args: argparse.Namespace, loaded: Loaded, *, limit: int | None = None) -> list[Prompt]:
    vocab_size = loaded.models.target.config.vocab_size
    return read_prompts(args.prompts, loaded.tokenizer, vocab_size=vocab_size, limit=limit, is_chat=args.chat)


def _check_writable(path: str | None, *, prompts: str | None = None, flag: str = "--json") -> None:
    """Raise OSError before the work, not after it, if a file cannot be written there; ValueError if it is the prompts file."""
    if path is None or path == "-":
        return
    check_writable(Path(path))
    if prompts is not None and os.path.exists(prompts) and os.path.exists(path) and os.path.samefile(path, prompts):
        raise ValueError(f"{flag} {path} is the prompts file itself; give another file.")


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


COMMANDS = {
    "demo": _demo,
    "generate": _generate,
    "bench": _bench,
    "map": _map,
    "doctor": _doctor,
    "profile": _profile,
    "convert": convert_command.run,
    "train": _train,
    "inspect": _inspect,
}
