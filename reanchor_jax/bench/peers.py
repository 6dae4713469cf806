"""Run ours and PyTorch peers on the same weights and prompts, greedily, in one process: transformers' `generate` and dflash's own loop.

In: an embedded pair's name or a directory of ours, prompts as token ids, a Request (temperature 0, batch size 1: the peers know no more).
Out: Runs of `compare`, one a prompt and method, and the figures `compare.results` makes of them.
Source: transformers, and dflash 0.1.0 (`pip install --no-deps dflash==0.1.0`). PyTorch is imported inside functions only.
    Each peer gets as many threads as there are cores to run on, a warm-up call before, and its decoding timed from its first token on.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from reanchor_jax import pairs
from reanchor_jax.bench import compare, tables
from reanchor_jax.bench.compare import Run
from reanchor_jax.bench.methods import Outcome, Request, method_config

# convert/ is a package of its own until it is installed, so a type checker may not find it
from reanchor_jax.convert.engine import export_huggingface  # pyright: ignore[reportMissingImports]
from reanchor_jax.statistics import ROUND_FIELDS
from reanchor_jax.text import load_tokenizer, read_prompts

COUNTERPARTS = {"transformers": "autoregressive", "dflash-pytorch": "dflash"}  # each peer and the method of ours that does the same


class Decoded(NamedTuple):
    """What a peer made of one prompt.

    acceptance_lengths: tokens of each target pass after the prefill, bonus included.
    prefill_seconds: until the first token. decode_seconds: all passes after it.
    """

    tokens: list[int]
    acceptance_lengths: list[int]
    prefill_seconds: float
    decode_seconds: float


def compare_peers(
    directory: Path | str,
    prompts: Sequence[Sequence[int]],
    *,
    request: Request,
    methods: Sequence[str] | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Run ours and every peer that the directory has models for, taking turns prompt by prompt; return figures as `compare.results`.

    methods: of ours; None means autoregressive and, with a drafter, dflash and reanchor. The key `ratios` holds our tokens per second over
    those of the peer that does the same. Raises ValueError for a request the peers cannot do, ImportError without PyTorch.
    """
    if request.temperature != 0 or request.batch_size != 1:
        raise ValueError(
            f"peers decode greedily, one prompt at a time; got temperature {request.temperature} and batch_size {request.batch_size}."
        )
    models = pairs.load_pair(directory)
    names = ["autoregressive"] if models.drafter is None else ["autoregressive", "dflash", "reanchor"]
    names = list(dict.fromkeys([compare.BASELINE, *(names if methods is None else methods)]))
    configs = {name: method_config(name, models, prompts, request=request) for name in names}
    peers = load_peers(directory, request=request)
    warmups = {}
    for name, decode in peers.items():
        start = time.perf_counter()
        decode(prompts[0])
        warmups[name] = time.perf_counter() - start
    runs: list[Run] = []

    def take_turns(run: Run) -> None:
        if run.method == compare.BASELINE:
            runs.extend(
                _run(name, run.first, decode(prompts[run.first]), warmups.pop(name, 0.0), request) for name, decode in peers.items()
            )

    ours = compare.compare(models, prompts, configs, request=request, on_run=take_turns, show_progress=show_progress)
    figures = compare.results(models, prompts, [*ours, *runs], request=request)
    rates = {name: found["tokens_per_second"] for name, found in figures["methods"].items()}
    pairs_of_rates = {peer: (rates.get(mine), rates[peer]) for peer, mine in COUNTERPARTS.items() if peer in rates}
    figures["ratios"] = {peer: mine / other for peer, (mine, other) in pairs_of_rates.items() if mine and other}
    figures["environment"]["versions"] |= _versions()
    return figures


def load_peers(directory: Path | str, *, request: Request) -> dict[str, Callable[[Sequence[int]], Decoded]]:
    """Functions from a prompt to Decoded, by the peer's name, over the weights of a directory of ours.

    The loop of dflash is left out where the directory has no drafter. Raises ImportError if PyTorch or dflash is not installed.
    """
    import torch  # pyright: ignore[reportMissingImports] - an extra
    import transformers

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="reanchor-jax-") as folder:
        exported = export_huggingface(pairs.path(directory), Path(folder) / "exported")
        target = transformers.AutoModelForCausalLM.from_pretrained(exported / "target", dtype="auto").eval()
        target.generation_config.eos_token_id = None  # the request says what stops; without this, no stop token would mean the model's own
        drafter = None
        if (exported / "drafter").is_dir():
            from dflash.model import DFlashDraftModel  # pyright: ignore[reportMissingImports]  # pyright: ignore[reportMissingImports] - an extra

            drafter = DFlashDraftModel.from_pretrained(exported / "drafter", dtype="auto").eval()
    peers: dict[str, Callable[[Sequence[int]], Decoded]] = {
        "transformers": lambda prompt: transformers_decode(target, prompt, request=request)
    }
    if drafter is not None:
        peers["dflash-pytorch"] = lambda prompt: dflash_decode(target, drafter, prompt, request=request)
    return peers


def transformers_decode(target: Any, prompt: Sequence[int], *, request: Request) -> Decoded:
    """Greedy `generate` of transformers, with its own cache and attention."""
    import torch  # pyright: ignore[reportMissingImports] - an extra

    clock = _FirstToken()
    ids = torch.tensor([list(prompt)])
    start = time.perf_counter()
    output = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        eos_token_id=list(request.stop_token_ids) or None,
        pad_token_id=0,
        streamer=clock,
    )
    end = time.perf_counter()
    tokens = output[0, len(prompt) :].tolist()
    assert clock.seconds is not None
    return Decoded(
        tokens=tokens,
        acceptance_lengths=[1] * (len(tokens) - 1),
        prefill_seconds=clock.seconds - start,
        decode_seconds=end - clock.seconds,
    )


def dflash_decode(target: Any, drafter: Any, prompt: Sequence[int], *, request: Request) -> Decoded:
    """`dflash_generate` of the dflash package, timed by itself; its clock waits for CUDA, so without CUDA it gets a plain one."""
    import torch  # pyright: ignore[reportMissingImports] - an extra
    from dflash import model as dflash  # pyright: ignore[reportMissingImports]  # pyright: ignore[reportMissingImports] - an extra

    ids: Any = torch.tensor([list(prompt)])
    clock = dflash._cuda_time if torch.cuda.is_available() else time.perf_counter
    with mock.patch.object(dflash, "_cuda_time", clock):
        result = dflash.dflash_generate(
            drafter,
            target,
            ids,
            request.max_new_tokens,
            list(request.stop_token_ids) or None,
            return_stats=True,
        )
    return Decoded(
        tokens=result.output_ids[0, len(prompt) :].tolist(),
        acceptance_lengths=result.acceptance_lengths,
        prefill_seconds=result.time_to_first_token,
        decode_seconds=result.time_per_output_token * result.num_output_tokens,
    )


class _FirstToken:
    """A streamer of transformers that notes when the first new token came; the first thing it is given is the prompt."""

    def __init__(self):
        self.num_puts = 0
        self.seconds: float | None = None

    def put(self, value) -> None:
        self.num_puts += 1
        if self.num_puts == 2:
            self.seconds = time.perf_counter()

    def end(self) -> None:
        pass


def _run(name: str, first: int, decoded: Decoded, warmup_seconds: float, request: Request) -> Run:
    lengths = decoded.acceptance_lengths
    # a peer tells tokens a pass only: its accepted drafts are those less the bonus, where a stop or the budget has cut them too
    rounds = {name: np.zeros(len(lengths), int).tolist() for name in ROUND_FIELDS}
    rounds |= {"num_emitted": list(lengths), "num_accepted": [length - 1 for length in lengths]}
    is_stopped = decoded.tokens[-1] in request.stop_token_ids
    outcome = Outcome(tokens=decoded.tokens, finish_reason="stop" if is_stopped else "length", rounds=rounds)
    return Run(name, first, warmup_seconds, decoded.prefill_seconds, decoded.decode_seconds, [outcome])


def _versions() -> dict[str, str]:
    import torch  # pyright: ignore[reportMissingImports] - an extra
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def main(arguments: Sequence[str] | None = None) -> None:
    """`python -m reanchor_jax.bench.peers`: print the table, and our rates over the peers'."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.bench.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pair", metavar="NAME|DIR", required=True, help="embedded pair or directory, with or without a drafter")
    parser.add_argument("--prompts", metavar="FILE", required=True, help="JSONL file of objects with `prompt` or `ids`")
    parser.add_argument("--num-examples", metavar="N", type=int, help="take the first N prompts")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--chat", action="store_true", help="wrap prompts by the tokenizer's chat template")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    args = parser.parse_args(arguments)
    directory = pairs.path(args.pair)
    models = pairs.load_pair(directory)
    tokenizer = load_tokenizer(directory)
    vocab_size, stops = models.target.config.vocab_size, models.target.config.eos_token_ids
    prompts = read_prompts(args.prompts, tokenizer, vocab_size=vocab_size, limit=args.num_examples, is_chat=args.chat)
    request = Request(max_new_tokens=args.max_new_tokens, stop_token_ids=stops)
    figures = compare_peers(directory, [prompt.ids for prompt in prompts], request=request)
    print(tables.terminal_table(figures))
    for peer, ratio in figures["ratios"].items():
        print(f"our {COUNTERPARTS[peer]} makes {ratio:.2f} times the tokens per second of {peer}")
    print(*tables.divergence_lines(figures), sep="\n")
    if args.json is not None:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
