"""What a method costs besides its rounds: `python -m reanchor_jax.bench.costs --pair NAME|DIR [--methods A,B]`.

In: a pair; a context and a batch as asked.
Out: a line a method: seconds until the first round without and with JAX's persistent compilation cache, and the peak of memory while
    decoding beside the estimate of `inspect`.
Source: ours. Each figure comes from a process of its own. A peak is the device's since the process began, where it tells one, else
    (Linux) what the process holds beyond its imports while decoding: programs too, which is most of it for a small model.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from reanchor_jax import inspection, pairs
from reanchor_jax.bench.methods import METHODS, SCHEDULED, Request, begin, method_config, run_rounds, split_names
from reanchor_jax.bench.passes import write_rows
from reanchor_jax.files import check_writable

_PROMPT, _NEW_TOKENS = 8, 32


def main(arguments: list[str] | None = None) -> int:
    """Measure every method in two processes: the second finds what the first compiled."""
    parser = argparse.ArgumentParser(prog="python -m reanchor_jax.bench.costs", description=__doc__)
    parser.add_argument("--pair", metavar="NAME|DIR", default="stories260k", help="default: %(default)s")
    parser.add_argument("--methods", metavar="A,B,C", default="autoregressive,dflash,reanchor", help="default: %(default)s")
    parser.add_argument("--context", metavar="N", type=int, default=512, help="tokens a row can hold; default: %(default)s")
    parser.add_argument("--batch", metavar="N", type=int, default=1, help="rows; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there too")
    parser.add_argument("--one", metavar="METHOD", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one is not None:
        print(json.dumps(_measure(args.pair, args.one, context=args.context, batch=args.batch)))
        return 0
    names = split_names(args.methods)
    try:
        if args.json is not None:
            check_writable(args.json)
        unknown = [name for name in names if name.partition(":")[0] not in METHODS or name == SCHEDULED]
        if unknown or not names:
            known = ", ".join(name for name in METHODS if name != SCHEDULED)
            raise ValueError(f"--methods must name some of {known}; got {', '.join(unknown) or 'none'}.")
        if args.batch < 1 or args.context < _PROMPT + _NEW_TOKENS:
            least = f"--batch must be at least 1 and --context at least {_PROMPT + _NEW_TOKENS}, a prompt with what is decoded behind it"
            raise ValueError(f"{least}; got {args.batch} and {args.context}.")
        where = pairs.find(args.pair)
        memory = inspection.memory_bytes(where.target, drafter=where.drafter, batch=args.batch, context=args.context)
        estimate = sum(memory.values())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    rows = []
    for method in names:
        with tempfile.TemporaryDirectory(prefix="reanchor-jax-") as folder:
            cold, warm = (_in_a_process(args, method, folder) for _ in range(2))
        row = {"method": method, "cold_seconds": cold["seconds"], "cached_seconds": warm["seconds"]}
        rows.append({**row, "peak_bytes": warm["peak_bytes"], "estimated_bytes": estimate})
        peak = "-" if warm["peak_bytes"] is None else f"{warm['peak_bytes'] / 1e6:,.0f} MB"
        print(
            f"{method:20} first round after {cold['seconds']:6.1f} s, with the persistent cache {warm['seconds']:6.1f} s; "
            f"peak {peak}, estimated {estimate / 1e6:,.0f} MB",
            flush=True,
        )
        if args.json is not None:
            write_rows(args.json, rows)
    return 0


def _in_a_process(args: argparse.Namespace, method: str, folder: str) -> dict[str, Any]:
    cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    cache["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    command = [sys.executable, "-m", "reanchor_jax.bench.costs", "--pair", args.pair, "--one", method]
    command += ["--context", str(args.context), "--batch", str(args.batch)]
    done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{method} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(pair: str, method: str, *, context: int, batch: int) -> dict[str, Any]:
    """Seconds from loaded weights to the end of the first round, and the peak of memory of a generation after that."""
    jax.devices()  # the backend is begun before anything is counted
    before = _resident("VmRSS")
    models = jax.block_until_ready(pairs.load_pair(pair))
    prompts = [[1] * _PROMPT] * batch
    request = Request(max_new_tokens=_NEW_TOKENS, batch_size=batch, cache_length=context)
    config = method_config(method, models, prompts, request=request)

    def decode(limit: int | None) -> None:
        state, _ = begin(models, prompts, range(batch), config=config, request=request)
        jax.block_until_ready(run_rounds(models, state, config=config, request=request, limit=limit))

    start = time.perf_counter()
    decode(1)
    seconds = time.perf_counter() - start
    with contextlib.suppress(OSError, AttributeError):  # what loading and compiling gave back goes back to the system, where that is glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # and the peak so far is forgotten
    decode(None)
    peak, most = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"), _resident("VmHWM")
    if peak is None and before is not None and most is not None:
        peak = most - before
    return {"seconds": seconds, "peak_bytes": peak}


def _resident(name: str) -> int | None:
    """Bytes of this process that are in memory, now (VmRSS) or at most (VmHWM); None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), None)


if __name__ == "__main__":
    sys.exit(main())
