"""Run PyTorch peers beside ours, on the same weights and prompts, greedily: transformers' `generate` and the loop of the package dflash.

In: an embedded pair's name or a directory of ours, prompts as token ids, a Request (temperature 0, batch size 1: the peers know no more).
Out: functions that make a Run of `compare` of a prompt, and the peers' figures beside ours.
Source: transformers, and dflash 0.1.0 (`pip install --no-deps dflash==0.1.0`). PyTorch is imported inside functions only.
    Each peer gets as many threads as there are cores to run on, and its decoding is timed from its first token on.
"""

import importlib.metadata
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from reanchor_jax import checkpoint, pairs
from reanchor_jax.bench.compare import Run
from reanchor_jax.bench.methods import Outcome, Request
from reanchor_jax.statistics import ROUND_FIELDS

COUNTERPARTS = {"huggingface": "autoregressive", "dflash": "dflash"}  # each peer and the method of ours that does the same
_PREFIX = "peer:"  # of a peer's runs among those of methods


class Decoded(NamedTuple):
    """What a peer made of one prompt.

    acceptance_lengths: tokens of each target pass after the prefill, bonus included.
    prefill_seconds: until the first token. decode_seconds: all passes after it.
    """

    tokens: list[int]
    acceptance_lengths: list[int]
    prefill_seconds: float
    decode_seconds: float


def load_peers(
    names: Sequence[str], directory: Path | str, prompts: Sequence[Sequence[int]], *, request: Request
) -> dict[str, Callable[[int], Run]]:
    """What makes a peer's run of the prompt at an index, by the name of its runs, over the weights of a directory of ours.

    Raises ValueError for an unknown name, a request the peers cannot do, a drafter's peer without a drafter, and a package that is missing.
    """
    if unknown := [name for name in names if name not in COUNTERPARTS]:
        raise ValueError(f"peers are {', '.join(COUNTERPARTS)}; got {', '.join(unknown)}.")
    if request.temperature != 0 or request.batch_size != 1:
        raise ValueError(
            f"peers decode greedily, one prompt at a time; got temperature {request.temperature} and batch_size {request.batch_size}."
        )
    packages = {"torch": "pip install torch", **({"dflash": "pip install --no-deps dflash==0.1.0"} if "dflash" in names else {})}
    if missing := [f"{name} ({how})" for name, how in packages.items() if importlib.util.find_spec(name) is None]:
        raise ValueError(f"peers need {', '.join(missing)}.")
    if "dflash" in names:
        _check_plain(directory)
    import torch  # pyright: ignore[reportMissingImports] - an extra
    import transformers

    # convert/ is a package of its own until it is installed: in a clone it lies elsewhere
    from reanchor_jax.convert.engine import export_huggingface  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    decoders: dict[str, Callable[[Sequence[int]], Decoded]] = {}
    with tempfile.TemporaryDirectory(prefix="reanchor-jax-") as folder:
        where = pairs.find(directory)
        exported = export_huggingface(where.target, Path(folder) / "target", parts=["target"])
        target = transformers.AutoModelForCausalLM.from_pretrained(exported / "target", dtype="auto").eval()
        target.generation_config.eos_token_id = None  # the request says what stops; without this, no stop token would mean the model's own
        if "huggingface" in names:
            decoders["huggingface"] = lambda prompt: transformers_decode(target, prompt, request=request)
        if "dflash" in names:
            from dflash.model import DFlashDraftModel  # pyright: ignore[reportMissingImports] - an extra

            exported = export_huggingface(where.drafter, Path(folder) / "drafter", parts=["drafter"])
            drafter = DFlashDraftModel.from_pretrained(exported / "drafter", dtype="auto").eval()
            decoders["dflash"] = lambda prompt: dflash_decode(target, drafter, prompt, request=request)

    def runner(name: str) -> Callable[[int], Run]:
        return lambda first: _run(_PREFIX + name, first, decoders[name](prompts[first]), request)

    return {_PREFIX + name: runner(name) for name in names}


def _check_plain(directory: Path | str) -> None:
    """Raise ValueError for a drafter that is none of the package dflash's own kind: it would run with parts left out."""
    found = checkpoint.read_contents(pairs.path(directory))
    if found.drafter_config is None:
        raise ValueError(f"the peer dflash needs a drafter; {directory} has none.")
    config = checkpoint.read_drafter_config(found, Path(directory))
    parts = {
        "a causal head": config.head is not None,
        "a mixture of taps": config.fusion == "per_layer",
        "an embedding": config.has_embedding,
        "a head": config.has_head,
        "slots that predict the next position": config.is_shifted,
    }
    if own := [name for name, has in parts.items() if has]:
        raise ValueError(f"the peer dflash runs plain DFlash drafters; that of {directory} has {', '.join(own)} of its own.")


def is_peer(method: str) -> bool:
    """Whether runs of this name are a peer's."""
    return method.startswith(_PREFIX) and method.removeprefix(_PREFIX) in COUNTERPARTS


def split_figures(figures: Mapping[str, Any], versions: Mapping[str, str]) -> dict[str, Any]:
    """Figures of `compare.results` with the peers' under `peers`, not among the methods. versions: of the packages they were measured with.

    ratio: tokens per second of the method of ours that does the same (counterpart), over the peer's; None if it was not run.
    """
    methods = {name: found for name, found in figures["methods"].items() if not is_peer(name)}
    peers = {}
    for name, found in figures["methods"].items():
        if is_peer(name):
            counterpart = COUNTERPARTS[name.removeprefix(_PREFIX)]
            rates = methods.get(counterpart, {}).get("tokens_per_second"), found["tokens_per_second"]
            told = {key: found[key] for key in ("tokens_per_second", "tau", "target_passes", "identical", "divergences", "prefill_seconds")}
            ratio = rates[0] / rates[1] if None not in rates else None
            peers[name.removeprefix(_PREFIX)] = {**told, "counterpart": counterpart, "ratio": ratio}
    if not peers:
        return dict(figures)
    speedup = {name: value for name, value in figures["speedup"].items() if not is_peer(name)}
    return {
        **figures,
        "methods": methods,
        "identical": all(found["identical"] for found in methods.values()),
        "speedup": speedup,
        "peers": peers,
        "environment": {**figures["environment"], "versions": {**figures["environment"]["versions"], **versions}},
    }


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
    from dflash import model as dflash  # pyright: ignore[reportMissingImports] - an extra

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


def _run(name: str, first: int, decoded: Decoded, request: Request) -> Run:
    lengths = decoded.acceptance_lengths
    # a peer tells tokens a pass only: its accepted drafts are those less the bonus, where a stop or the budget has cut them too
    rounds = {name: np.zeros(len(lengths), int).tolist() for name in ROUND_FIELDS}
    rounds |= {"num_emitted": list(lengths), "num_accepted": [length - 1 for length in lengths]}
    is_stopped = decoded.tokens[-1] in request.stop_token_ids
    outcome = Outcome(tokens=decoded.tokens, finish_reason="stop" if is_stopped else "length", rounds=rounds)
    return Run(name, first, 0.0, decoded.prefill_seconds, decoded.decode_seconds, [outcome])


def versions() -> dict[str, str]:
    """Versions of the packages that peers run in, as far as they are installed."""
    names = [name for name in ("torch", "transformers", "dflash") if importlib.util.find_spec(name) is not None]
    return {name: importlib.metadata.version(name) for name in names}
