"""The eight benchmarks of block-diffusion drafters by name: where their rows are, how a row becomes a prompt, which rows are taken.

In: a benchmark's name; a folder with NAME.jsonl, or the hub (package `datasets`, extra `hub`).
Out: Tasks, a row each: its id and what the user says, turn by turn.
Source: ReAnchor, Experiments; formats of dflash 0.1.0 and DeepSpec's eval_datasets. The paper draws with seed 0 and does not tell how:
    rows are shuffled as dflash does (`random.Random(seed).shuffle` of their indices, its seed is 42) and the first n are taken.
"""

import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reanchor_jax.text import parse_record, read_lines


class Benchmark(NamedTuple):
    """Where a benchmark's rows are on the hub.

    title: as in tables. config: None if there is only one. prompt: the field with the problem or the turns.
    id: the field that names a row; None: its number. files: JSON files to read where the repository's own script no longer can be.
    """

    title: str
    repository: str
    config: str | None
    split: str
    prompt: str
    id: str | None
    files: tuple[str, ...] = ()


class Task(NamedTuple):
    """One row. turns: what the user says, formatted; the second follows the answer to the first."""

    id: str
    turns: tuple[str, ...]


BENCHMARKS = {
    "gsm8k": Benchmark("GSM8K", "openai/gsm8k", "main", "test", "question", None),
    "math500": Benchmark("MATH-500", "HuggingFaceH4/MATH-500", None, "test", "problem", "unique_id"),
    "aime25": Benchmark("AIME25", "MathArena/aime_2025", None, "train", "problem", "problem_idx"),
    "humaneval": Benchmark("HumanEval", "openai/openai_humaneval", None, "test", "prompt", "task_id"),
    "mbpp": Benchmark("MBPP", "google-research-datasets/mbpp", "sanitized", "test", "prompt", "task_id"),
    "livecodebench": Benchmark(
        "LiveCodeBench",
        "livecodebench/code_generation_lite",
        None,
        "test",
        "question_content",
        "question_id",
        files=("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
    ),
    "mt_bench": Benchmark("MT-Bench", "HuggingFaceH4/mt_bench_prompts", None, "train", "prompt", "prompt_id"),
    "alpaca": Benchmark("Alpaca", "tatsu-lab/alpaca", None, "train", "instruction", None),
}


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError unless there are names and all are of BENCHMARKS."""
    if not names or not BENCHMARKS.keys() >= set(names):
        unknown = ", ".join(name for name in names if name not in BENCHMARKS) or "none"
        raise ValueError(f"benchmarks are {', '.join(BENCHMARKS)}; got {unknown}.")


def read_tasks(name: str, directory: Path | str | None) -> list[Task]:
    """All tasks of a benchmark, in the order of its rows, from NAME.jsonl of a directory or else from the hub.

    Raises ValueError for a row that is not one (with its place and the rule) and a hub that cannot be read, FileNotFoundError for a
    missing file.
    """
    rows = _hub_rows(name) if directory is None else _local_rows(name, Path(directory))
    tasks = [_task(name, row, place) for place, row in rows]
    if not tasks:
        raise ValueError(f"{name} holds no rows{'' if directory is None else f' in {directory}'}; get it again from its source.")
    return tasks


def draw(tasks: Sequence[Task], count: int | None, *, seed: int) -> list[Task]:
    """The first `count` tasks in the order of the seed, all of them if there are no more."""
    order = list(range(len(tasks)))
    random.Random(seed).shuffle(order)
    return [tasks[index] for index in order[:count]]


def format_prompt(name: str, prompt: str, *, starter_code: str = "") -> str:
    """The text that a model is asked. starter_code: of livecodebench, where the problem gives some."""
    templates = _templates()
    code = templates["code"]
    fields = {
        "prompt": prompt,
        "form": code["given" if starter_code else "free"],
        "code": starter_code or code["placeholder"],
    }
    # in one pass: a problem's own braces are no fields
    return re.sub(r"\{(prompt|form|code)\}", lambda match: fields[match[1]], templates["prompts"][name])


@functools.cache
def _templates() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))


def _task(name: str, row: Mapping[str, Any], place: str) -> Task:
    """Build the task of a row {id, prompt | turns, starter_code}. Raises ValueError naming its place and the rule."""
    identifier, code = row.get("id"), row.get("starter_code") or ""
    is_chat = name == "mt_bench"
    turns: Any = row.get("turns") if is_chat else [row.get("prompt")]
    if not isinstance(identifier, (str, int)):
        raise ValueError(f"{place}: id must be a string or a number; got {identifier!r}.")
    if not isinstance(turns, list) or len(turns) != 1 + is_chat or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        rule = "turns must be a list of two texts that are" if is_chat else "prompt must be a text that is"
        raise ValueError(f"{place}: {rule} not empty; got {str(turns if is_chat else row.get('prompt'))[:60]}.")
    if not isinstance(code, str):
        raise ValueError(f"{place}: starter_code must be text; got {str(code)[:60]}.")
    for text in (str(identifier), *turns, code):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            what = f"{error.reason} at character {error.start} of a text"
            raise ValueError(f"{place} is not valid UTF-8 text ({what}); fix it.") from error
    return Task(id=str(identifier), turns=tuple(format_prompt(name, turn, starter_code=code) for turn in turns))


def _local_rows(name: str, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    path = directory / f"{name}.jsonl"
    if not path.is_file():
        found = sorted(other.name for other in directory.glob("*.jsonl"))
        there = f"it holds {', '.join(found)}" if found else "it holds no .jsonl files" if directory.is_dir() else "it is not a directory"
        raise FileNotFoundError(f"{directory} has no {path.name} ({there}); write one JSON object a line, with id and prompt.")
    for place, line in read_lines(path):
        yield place, parse_record(line, place)


def _hub_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the hub in the form of local ones."""
    benchmark = BENCHMARKS[name]
    advice = f"or give --benchmark-dir DIR, a folder with {name}.jsonl"
    try:
        import datasets  # pyright: ignore[reportMissingImports] - an extra
    except ImportError as error:
        raise ValueError(
            f"{name} is read from the hub by the package datasets; install the extra hub (pip install '.[hub]'), {advice}."
        ) from error
    try:
        if benchmark.files:
            files = [f"hf://datasets/{benchmark.repository}/{file}" for file in benchmark.files]
            found = datasets.load_dataset("json", data_files={benchmark.split: files}, split=benchmark.split)
        else:
            found = datasets.load_dataset(benchmark.repository, benchmark.config, split=benchmark.split)
    except Exception as error:  # whatever the network, the hub and the package may raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{benchmark.repository} cannot be read from the hub ({reason}); try again with a network, {advice}.") from error
    for index, row in enumerate(found):
        value = row.get(benchmark.prompt)
        if name == "alpaca" and row.get("input"):
            value = f"{value}\n\nInput:\n{row['input']}"
        identifier = index if benchmark.id is None else row.get(benchmark.id)
        record = {"id": f"{name.replace('_', '-')}-{identifier}", "starter_code": row.get("starter_code")}
        yield f"{benchmark.repository} row {index}", {**record, "turns" if name == "mt_bench" else "prompt": value}
