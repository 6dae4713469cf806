"""What the command line accepts: the parser of every subcommand.

In: the function that runs each subcommand.
Out: an ArgumentParser whose result holds that function as `run`.
Source: flags of requests, rollouts, drafter and training are the fields of their records, told with the sentences of their docstrings.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from reanchor_jax.bench.benchmarks import BENCHMARKS
from reanchor_jax.bench.doctor import FLOOR
from reanchor_jax.bench.methods import METHODS, Request
from reanchor_jax.bench.profiles import ProfileConfig
from reanchor_jax.checkpoint import DTYPES
from reanchor_jax.decoding.config import DRAFT_CHOICES, RETAIN_POLICIES
from reanchor_jax.training.recipe import RolloutConfig
from reanchor_jax.training.settings import recipe_names
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig

T = TypeVar("T")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors, told like all others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see `{self.prog} --help`)")


def make_parser(
    commands: Mapping[str, Callable[[argparse.Namespace], int | None]], add_convert_arguments: Callable[[argparse.ArgumentParser], None]
) -> argparse.ArgumentParser:
    """Build the parser. commands: what runs each subcommand, by its name."""
    parser = _Parser(prog="reanchor-jax", description="Lossless speculative decoding in JAX: ReAnchor on block-diffusion drafters.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        subparser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        subparser.set_defaults(run=commands[name])
        return subparser

    demo = add("demo", "tell a story with the embedded pair and compare the methods")
    demo.add_argument("--pair", metavar="NAME|DIR", default="stories260k", help="embedded pair or directory (default: %(default)s)")
    demo.add_argument("--json", metavar="FILE", help="also write the figures to a file")

    generate = add("generate", "continue prompts")
    _add_models(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="one prompt; its text is shown round by round")
    prompt.add_argument("--prompts", metavar="FILE", help="JSONL file of objects with `prompt` or `ids`, and optionally `id`")
    known = f"of {', '.join(METHODS)}; fields of DecodeConfig may follow: reanchor:attach=random:num_nodes=64"
    generate.add_argument(
        "--method",
        metavar="NAME",
        help=f"one {known} (default: reanchor, with --profile scheduled, without a drafter autoregressive)",
    )
    _add_request(generate)
    generate.add_argument("--json", metavar="FILE|-", help="write results as JSON to a file, or to standard output (-)")

    bench = add("bench", "compare methods on a prompts file or on benchmarks; an interrupted run is resumed")
    _add_models(bench)
    source = bench.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", metavar="FILE", help="JSONL file of objects with `prompt` or `ids`")
    source.add_argument("--benchmarks", metavar="A,B,C", help=f"of {', '.join(BENCHMARKS)}; the target's chat template wraps them")
    bench.add_argument("--benchmark-dir", metavar="DIR", help="folder with NAME.jsonl of each benchmark (default: they come from the hub)")
    bench.add_argument("--num-examples", metavar="N", type=_positive, help="take the first N prompts, of each benchmark N drawn by --seed")
    bench.add_argument(
        "--temperatures", metavar="X,Y", type=_several(float, "numbers"), help="measure benchmarks at each, in folders T0, T1, ..."
    )
    bench.add_argument(
        "--drafters", metavar="A,B", help="measure benchmarks with each of these drafters of the pair, in folders of their names"
    )
    bench.add_argument("--thinking", choices=("on", "off"), help="enable_thinking of the chat template (default: as the template has it)")
    bench.add_argument("--preflight", action="store_true", help="tell by the rounds of dflash whether a longer block is worth training")
    bench.add_argument(
        "--traces", metavar="NAME", help="also decode by this method and count what its rejected tokens and blocks were worth"
    )
    bench.add_argument("--methods", metavar="A,B,C", default="autoregressive,dflash,reanchor", help=known)
    _add_request(bench)
    bench.add_argument(
        "--peers",
        metavar="A,B",
        default="",
        help="PyTorch programs that take turns with the methods: huggingface (generate of transformers), dflash (the package's loop)",
    )
    bench.add_argument(
        "--out", metavar="DIR", required=True, help="folder for results.json, tables.md, charts, and the runs by which it is resumed"
    )

    mapping = add("map", "complete a file of prompts, however long; an interrupted run is resumed")
    _add_models(mapping)
    mapping.add_argument(
        "--prompts", metavar="FILE", required=True, help="JSONL file of objects with `prompt`, `messages` or `ids`, and optionally `id`"
    )
    mapping.add_argument("--out", metavar="FILE", required=True, help="JSONL file to write a line a prompt to, in the order they end")
    mapping.add_argument("--method", choices=[name for name in METHODS if name != "scheduled"], help="default: as of generate")
    mapping.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end a text before this; may be given several times")
    mapping.add_argument(
        "--cache-length", metavar="N", type=_positive, help="tokens a row can hold (default: the target's positions, at most 4096)"
    )
    mapping.add_argument("--batch-size", metavar="N", type=_positive, default=8, help="prompts decoded together (default: %(default)s)")
    _add_sampling(mapping)

    profile = add("profile", "measure what drafts and target passes cost here, for the method scheduled")
    _add_models(profile)
    profile.add_argument(
        "--prompts", metavar="FILE", required=True, help="JSONL file of objects with `prompt` or `ids`, like what will come"
    )
    profile.add_argument("--chat", action="store_true", help="wrap prompts by the tokenizer's chat template")
    profile.add_argument("--out", metavar="FILE", required=True, help="JSON file to write")
    add_fields(profile, ProfileConfig)

    add_convert_arguments(add("convert", "turn PyTorch checkpoints into a directory of ours"))

    train = add("train", "train a drafter on the target's own continuations; an interrupted run is resumed")
    source = train.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", metavar="DIR", help="directory of the target, Hugging Face's or ours")
    source.add_argument("--pair", metavar="NAME|DIR", help="embedded pair or directory; its target is used")
    train.add_argument("--prompts", metavar="FILE", required=True, help="JSONL file of objects with `prompt`: texts to begin from")
    train.add_argument("--out", metavar="DIR", required=True, help="folder for rollouts, log, checkpoints and drafter/")
    train.add_argument(
        "--recipe", metavar="NAME|FILE", help=f"settings in place of the defaults: {', '.join(recipe_names())}, or a JSON file"
    )
    train.add_argument("--start", metavar="NAME|DIR", help="pair or drafter whose weights are taken over where they fit")
    train.add_argument("--mesh", metavar="D,M", type=_ids, help="train on D * M devices: rows over D, weights over M")
    for record in (RolloutConfig, DrafterShape, TrainConfig):
        add_fields(train, record)

    doctor = add("doctor", "examine a pair: equal output, tau against a floor, and the likely cause where it is low")
    _add_models(doctor)
    doctor.add_argument("--prompts", metavar="FILE", help="JSONL file of objects with `prompt` or `ids` (default: the target samples some)")
    doctor.add_argument("--chat", action="store_true", help="wrap prompts by the tokenizer's chat template")
    doctor.add_argument(
        "--floor", metavar="X", type=float, default=FLOOR, help="least tau of the plain chain that is well (default: %(default)s)"
    )
    doctor.add_argument("--num-examples", metavar="N", type=_positive, default=8, help="take the first N prompts (default: %(default)s)")
    doctor.add_argument("--max-new-tokens", metavar="N", type=_positive, default=48, help="default: %(default)s")

    inspect = add("inspect", "tell what a directory holds")
    inspect.add_argument("directory", metavar="DIR", help="directory or embedded pair")
    inspect.add_argument("--context", metavar="N", type=_positive, help="also tell the memory that rows of N tokens need")
    inspect.add_argument("--batch", metavar="N", type=_positive, help="rows to tell the memory for, with --context (default: 1)")
    inspect.add_argument("--verify", action="store_true", help="compare every weights file with the SHA-256 recorded when it was written")
    return parser


def add_fields(parser: argparse.ArgumentParser, record: type) -> None:
    """Add a flag for every field of a config dataclass; what is not given stays out of the result of `read_fields`."""
    group = parser.add_argument_group(record.__name__, (record.__doc__ or "").split("\n")[0])
    for field in dataclasses.fields(record):
        has_default = field.default is not dataclasses.MISSING
        default = f" (default: {field.default})" if has_default and field.default is not None else ""
        if field.type is bool:  # --NAME, and --no-NAME against a recipe
            flag = f"--{field.name.removeprefix('is_').replace('_', '-')}"
            group.add_argument(flag, dest=field.name, action=argparse.BooleanOptionalAction, help=_sentence(record, field.name))
            continue
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_reader(field.type),
            metavar={int: "N", float: "X", str: "NAME", int | None: "N"}.get(field.type, "A,B,C"),
            help=_sentence(record, field.name) + default,
        )


def read_fields(args: argparse.Namespace, record: type[T], **defaults: Any) -> T:
    """Build a config dataclass from the flags of `add_fields`, and from defaults where a flag is not given.

    Raises ValueError if a field has neither.
    """
    fields = dataclasses.fields(record)  # pyright: ignore[reportArgumentType]
    values = defaults | {field.name: getattr(args, field.name) for field in fields if getattr(args, field.name) is not None}
    if missing := [field.name for field in fields if field.default is dataclasses.MISSING and field.name not in values]:
        raise ValueError(f"give {', '.join('--' + name.replace('_', '-') for name in missing)}.")
    return record(**values)


def _add_models(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pair", metavar="NAME|DIR", help="embedded pair, or a directory with target and drafter")
    source.add_argument("--target", metavar="DIR", help="directory of a target, ours or Hugging Face's")
    parser.add_argument("--drafter", metavar="DIR", help="directory of its drafter, ours or z-lab's")
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights (default: as stored)")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--retain", choices=RETAIN_POLICIES[1:], help="states the method reanchor reuses (default: baseline, the paper's)")
    parser.add_argument(
        "--num-nodes",
        metavar="N",
        type=_positive,
        help="trie nodes, anchor included (default: 64 of ddtree and reanchor-tree, else the tokens of all blocks, at most 256)",
    )
    parser.add_argument("--profile", metavar="FILE", help="costs measured by the command profile; adds the method scheduled")
    _add_sampling(parser)
    parser.add_argument(
        "--draft-sampling",
        dest="draft_choice",
        choices=DRAFT_CHOICES,
        default=Request.draft_choice,
        help="how drafts are chosen at temperature > 0 (default: %(default)s)",
    )
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    parser.add_argument("--cache-length", metavar="N", type=_positive, help="tokens a row can hold (default: as the prompts need)")
    parser.add_argument("--batch-size", metavar="N", type=_positive, default=1, help="prompts decoded together (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="wrap prompts by the tokenizer's chat template")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-new-tokens", metavar="N", type=_positive, default=200, help="default: %(default)s")
    parser.add_argument("--temperature", metavar="X", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", metavar="X", type=float, default=1.0, help="1 keeps all tokens (default)")
    parser.add_argument("--top-k", metavar="N", type=int, default=0, help="0 keeps all tokens (default)")
    parser.add_argument("--min-p", metavar="X", type=float, default=0.0, help="0 keeps all tokens (default)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="default: %(default)s")


def _positive(text: str) -> int:
    value = int(text) if text.strip().lstrip("+-").isdecimal() else None
    if value is None or value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1; got {text}")
    return value


def _reader(kind: Any) -> Callable[[str], Any]:
    """How a flag's text becomes a value of the field's type."""
    if kind in (float, str):
        return kind
    return int if kind in (int, int | None) else _ids


def _several(kind: Callable[[str], Any], what: str) -> Callable[[str], tuple[Any, ...]]:
    """How a flag's text becomes several values with commas between; what: the values in words."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {what} with commas between; got {text!r}") from error

    return read


_ids = _several(int, "whole numbers")


def _sentence(record: type, name: str) -> str:
    """What the docstring of a record says about a field, in `name: sentence` form."""
    names = "|".join(field.name for field in dataclasses.fields(record))  # pyright: ignore[reportArgumentType]
    match = re.search(rf"\b{name}: (.*?)\.?(?=\s(?:{names}): |$)", re.sub(r"\s+", " ", record.__doc__ or "").strip())
    return (match[1] if match else name.replace("_", " ")).strip().replace("%", "%%")
