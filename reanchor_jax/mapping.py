"""Complete a file of prompts, however long: rows of a batch that end make room for the next prompt.

In: a Generator, a JSONL file of prompts, what to ask of each.
Out: a JSONL file with a line a prompt, in the order in which they ended; run again, it goes on where it was.
Source: continuous batching (Orca, Yu et al. 2022), a row of the batch at a time.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from reanchor_jax.decoding.loop import prefill
from reanchor_jax.decoding.state import DecodeState
from reanchor_jax.decoding.walk import RUNNING, STOP
from reanchor_jax.fields import is_integer
from reanchor_jax.files import sha256
from reanchor_jax.generation import TextRequest
from reanchor_jax.generator import Generator, Row, run_round
from reanchor_jax.streaming import Follower
from reanchor_jax.text import parse_record, pin_settings, read_lines


class Mapped(NamedTuple):
    """What `map_prompts` did. num_rows: lines the file holds now. num_new: of them written by this call; the rest is of those.

    num_failed: prompts that could not be completed.
    """

    num_rows: int
    num_new: int
    num_failed: int
    num_tokens: int
    num_passes: int


class _Admitted(NamedTuple):
    """A prompt. place: index of its line, from 0 on. identifier: its name. row: None if it cannot be. began: seconds of a clock."""

    place: int
    identifier: Any
    row: Row | None
    began: float
    error: str | None = None


def map_prompts(
    generator: Generator,
    source: Path | str,
    out: Path | str,
    *,
    batch_size: int = 8,
    generation_config: Any = None,
    seed: int = 0,
    show_progress: bool | None = None,
    **fields: Any,
) -> Mapped:
    """Complete every prompt of a JSONL file, batch_size rows at a time, and write a line for each as it ends.

    source: lines with `prompt` (a text), `messages` (a conversation) or `ids`, and optionally `id`.
    generation_config, fields: as `Generator.generate` takes them.
    out: lines with `index` (of the prompt's line, from 0 on), `id`, `text`, `token_ids`, `finish_reason`, `acceptance_lengths`, `tau`
        (tokens a target pass, None without a pass), `seconds` from its prefill to its end, and `tokens_per_second`; or `index`, `id` and
        `error` of a prompt that cannot be. Beside it, `OUT.settings.json`.
    seed: the prompt at an index draws with the key fold_in(key(seed), index), so its text is the one it has alone.
    Run again with the same settings, it leaves out the prompts that have a line; a line cut short by a kill is removed and done again.
    Raises ValueError for what no prompt can be asked, for lines that are no JSON objects, and for other settings than OUT's.
    """
    source, out = Path(source), Path(out)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    request = generator.request(generation_config, fields)
    if request.num_return_sequences != 1 or request.has_scores or request.has_logits:
        raise ValueError("a map writes one text a prompt: leave out num_return_sequences, output_scores and output_logits.")
    asked = {**request._asdict(), "seed": seed, "decoding": asdict(generator.config), "prompts_sha256": sha256(source)}
    pin_settings(out.with_name(f"{out.name}.settings.json"), asked)
    done = _done(out)
    is_shown = sys.stderr.isatty() if show_progress is None else show_progress
    total = sum(1 for _ in read_lines(source))
    counts = np.zeros(3, np.int64)
    waiting = _prompts(source, done)
    with out.open("ab") as file, tqdm(total=total, initial=len(done), unit="row", disable=not is_shown) as progress:
        for admitted in _ended(generator, waiting, request, batch_size=batch_size, seed=seed):
            line: dict[str, Any] = {"index": admitted.place, "id": admitted.identifier} | (
                {"error": admitted.error} if admitted.row is None else _told(generator, admitted.row, request, began=admitted.began)
            )
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            counts += len(line.get("token_ids", ())), len(line.get("acceptance_lengths", ())), "error" in line
            progress.update()
            progress.set_postfix(tau=f"{counts[0] / max(counts[1], 1):.2f}", refresh=False)
    num_tokens, num_passes, num_failed = counts.tolist()
    return Mapped(num_rows=total, num_new=total - len(done), num_failed=num_failed, num_tokens=num_tokens, num_passes=num_passes)


def _done(out: Path) -> set[int]:
    """Indices that have a line; the file is cut behind the last whole one. Raises ValueError for a whole line that is none of a map."""
    if not out.exists():
        return set()
    done, end = set(), 0
    with out.open("rb+") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            index = parse_record(line.decode("utf-8", "replace"), f"{out} line {number}").get("index")
            if not is_integer(index) or index in done:
                raise ValueError(f"{out} line {number} must hold index, a number no line before it has; got {index!r}; remove that line.")
            done.add(index)
            end += len(line)
        file.truncate(end)
    return done


def _prompts(source: Path, done: set[int]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Index, place and record of the prompts that have no line yet, read as they are asked for."""
    for index, (place, line) in enumerate(read_lines(source)):
        if index not in done:
            yield index, place, parse_record(line, place)


def _ended(
    generator: Generator, waiting: Iterator[tuple[int, str, dict[str, Any]]], request: TextRequest, *, batch_size: int, seed: int
) -> Iterator[_Admitted]:
    """Prompts as they end. Rows are admitted one by one; a round is run when the batch is full, or nobody waits."""
    state: DecodeState | None = None
    places: list[_Admitted | None] = [None] * batch_size
    while True:
        for place in range(batch_size):
            while places[place] is None and (following := next(waiting, None)) is not None:
                admitted, fresh = _admit(generator, *following, request=request, seed=seed)
                if fresh is None or admitted.row is None or admitted.row.finish_reason != "running":  # it ends before its first round
                    yield admitted
                    continue
                places[place] = admitted
                if state is None:  # every row a copy of the first; those without a prompt have ended
                    state = _spread(fresh, batch_size)
                state = _place(state, fresh, jnp.int32(place))
        if state is None or not any(places):
            return
        state, info = run_round(generator.models, state, config=generator.config)
        assert state is not None
        emitted, finish = jax.device_get((info.emitted, state.finish))
        is_stopped = np.zeros(batch_size, bool)
        for place, admitted in enumerate(places):
            if admitted is None or admitted.row is None:
                continue
            admitted.row.take(emitted, place, int(finish[place]), is_round=True)
            if admitted.row.finish_reason != "running":
                is_stopped[place], places[place] = admitted.row.finish_reason == "stop_string", None
                yield admitted
        if is_stopped.any():
            state = state._replace(finish=jnp.where(is_stopped & (state.finish == RUNNING), STOP, state.finish))


def _admit(
    generator: Generator, index: int, where: str, record: dict[str, Any], *, request: TextRequest, seed: int
) -> tuple[_Admitted, DecodeState | None]:
    """Prefill one prompt, in a batch of its own."""
    began, identifier = time.perf_counter(), record.get("id", index)
    key = jax.random.fold_in(jax.random.key(seed), index)
    try:
        ids = generator.encode(_content(record), None)
        state, emitted = prefill(**generator.arguments([ids], request, key[None]))
    except ValueError as error:
        return _Admitted(place=index, identifier=identifier, row=None, began=began, error=f"{where}: {error}"), None
    follower = None if generator.tokenizer is None else Follower(generator.tokenizer, ids, request.stop_strings)
    row = Row(ids, follower)
    row.take(jax.device_get(emitted), 0, int(state.finish[0]), is_round=False)
    return _Admitted(place=index, identifier=identifier, row=row, began=began), state


def _content(record: dict[str, Any]) -> Any:
    """The prompt of a record. Raises ValueError unless it holds one, of its type."""
    kinds = {"prompt": str, "messages": list, "ids": list}
    names = [name for name in kinds if name in record]
    if len(names) != 1 or not isinstance(record[names[0]], kinds[names[0]]):
        raise ValueError("it must hold one of prompt (a text), messages and ids (lists).")
    return record[names[0]]


def _told(generator: Generator, row: Row, request: TextRequest, *, began: float) -> dict[str, Any]:
    """What a line says of a row that has ended."""
    found, seconds = generator.completion(row, request), time.perf_counter() - began
    num_passes = len(found.acceptance_lengths)
    return {
        "text": found.text,
        "token_ids": found.token_ids,
        "finish_reason": found.finish_reason,
        "acceptance_lengths": found.acceptance_lengths,
        "tau": sum(found.acceptance_lengths) / num_passes if num_passes else None,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(len(found.token_ids) / seconds, 3),
    }


def _of_rows(state: DecodeState) -> DecodeState:
    """The state without what all rows share."""
    bans = None if state.bans is None else state.bans._replace(token_ids=None)
    return state._replace(stop_token_ids=None, bans=bans)


def _with_shared(rows: DecodeState, state: DecodeState) -> DecodeState:
    bans = None if state.bans is None or rows.bans is None else rows.bans._replace(token_ids=state.bans.token_ids)
    return rows._replace(stop_token_ids=state.stop_token_ids, bans=bans)


@partial(jax.jit, static_argnums=1)
def _spread(state: DecodeState, num_rows: int) -> DecodeState:
    """A state of num_rows rows like the first, all of them ended."""
    rows = jax.tree.map(lambda x: jnp.repeat(x, num_rows, axis=0), _of_rows(state))
    return _with_shared(rows._replace(finish=jnp.full((num_rows,), STOP, jnp.int32)), state)


@partial(jax.jit, donate_argnums=0)
def _place(state: DecodeState, fresh: DecodeState, row: jax.Array) -> DecodeState:
    """The state with a row taken from a state of one."""
    return _with_shared(jax.tree.map(lambda x, new: x.at[row].set(new[0]), _of_rows(state), _of_rows(fresh)), state)
