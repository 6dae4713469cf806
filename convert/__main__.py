"""Command line of the conversion room: `python -m reanchor_jax.convert`, also reached as `reanchor-jax convert`.

In: arguments.
Out: a directory, and one line saying where.
Source: none.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint import DTYPES
from reanchor_jax.files import error_text, read_json

from .engine import convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` reads."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--target", metavar="DIR", help="Llama-3.x, Qwen3 or Gemma-4: a Hugging Face directory, or a hub id owner/name")
    source.add_argument(
        "--pair", metavar="NAME_OR_DIR", help="embedded pair, or a directory written before; its drafter is kept unless --drafter"
    )
    parser.add_argument("--drafter", metavar="DIR", help="DFlash-family drafter: a directory or a hub id; or what train wrote")
    parser.add_argument(
        "--alignment", choices=("own", "next"), help="position that a slot predicts, if config.json does not say it or is wrong"
    )
    parser.add_argument("--num-drafts", type=int, metavar="N", help="tokens a block drafts, if fewer than it could (Domino: 15 of 16)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="JSON with the temperatures of a DSpark confidence head")
    parser.add_argument("--out", metavar="DIR", required=True, help="directory to write; must not exist or be empty")
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights; default: keep the checkpoint's dtype")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print the mapping, write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it was written by this package")


def run(args: argparse.Namespace) -> None:
    """Convert as the arguments say. Raises as `engine.convert`."""
    written = convert(
        args.target,
        args.drafter,
        args.out,
        pair=args.pair,
        dtype=args.dtype,
        options=_options(args),
        dry_run=args.dry_run,
        overwrite=args.overwrite,
    )
    print("dry run: nothing was written" if written is None else f"written: {written}")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if args.alignment is not None:
        options["is_shifted"] = args.alignment == "next"
    if args.num_drafts is not None:
        options["num_drafts"] = args.num_drafts
    if args.calibration is not None:
        if not args.calibration.exists():
            raise FileNotFoundError(f"--calibration {args.calibration} was not found; give a JSON file with a list `temperatures`.")
        table = read_json(args.calibration)
        if table is None or not isinstance(table.get("temperatures"), list):
            raise ValueError(f"{args.calibration} must be a JSON file with a list `temperatures`, one a drafted token.")
        options["temperatures"] = table["temperatures"]
    return options


def main(arguments: list[str] | None = None) -> None:
    """Parse and run; problems are told on standard error, with exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.convert", description="Convert PyTorch checkpoints to our directories.")
    add_arguments(parser)
    try:
        run(parser.parse_args(arguments))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error_text(error)}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
