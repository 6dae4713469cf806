"""Benchmarks: prompts are formatted as published, rows drawn by a seed, bad rows told by place and rule, the hub read in their form."""

import json
import random
import sys
from types import SimpleNamespace

import pytest

from reanchor_jax.bench.benchmarks import BENCHMARKS, Task, check_names, draw, format_prompt, read_tasks

_REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _write(folder, name, *rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k", "{a} of {prompt}, {code}" + _REASON),
        ("math500", "{a} of {prompt}, {code}" + _REASON),
        ("aime25", "{a} of {prompt}, {code}" + _REASON),
        (
            "humaneval",
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{a} of {prompt}, {code}\n```",
        ),
        ("mbpp", "{a} of {prompt}, {code}"),
        ("mt_bench", "{a} of {prompt}, {code}"),
        ("alpaca", "{a} of {prompt}, {code}"),
    ],
)
def test_a_prompt_is_formatted_as_published_and_its_own_braces_stay(name, expected):
    assert format_prompt(name, "{a} of {prompt}, {code}") == expected


@pytest.mark.parametrize(
    ("code", "form"),
    [
        ("class Solution:\n    x = {prompt}", "Use the following code structure:\n```python\nclass Solution:\n    x = {prompt}\n```"),
        ("", "Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"),
    ],
)
def test_livecodebench_shows_the_code_to_begin_from_or_where_to_write_it(code, form):
    head, rest = format_prompt("livecodebench", "Print {code}.", starter_code=code).split("\n\n### Question:\n")
    assert head.startswith("You are an expert Python programmer. You will be given a question (problem specification) and will generate")
    assert head.endswith("passes all tests. You will NOT return anything except for the program")
    assert rest == f"Print {{code}}.\n\n### Format: {form}\n\n### Answer: (use the provided format with backticks)"


def test_rows_become_tasks_in_their_order(tmp_path):
    _write(tmp_path, "mbpp", {"id": "mbpp-11", "prompt": "Add."}, {"id": 12, "prompt": "Sort.", "answer": "no part of it"})
    _write(tmp_path, "mt_bench", {"id": "mt-bench-81", "turns": ["Tell.", "Again."]})
    assert read_tasks("mbpp", tmp_path) == [Task("mbpp-11", ("Add.",)), Task("12", ("Sort.",))]
    assert read_tasks("mt_bench", tmp_path) == [Task("mt-bench-81", ("Tell.", "Again."))]


def test_a_seed_draws_the_same_rows_every_time_in_the_order_of_dflash():
    tasks = [Task(str(index), (f"question {index}",)) for index in range(23)]
    order = list(range(23))
    random.Random(42).shuffle(order)
    assert [task.id for task in draw(tasks, 7, seed=42)] == [str(index) for index in order[:7]]
    assert draw(tasks, 5, seed=42) == draw(tasks, 7, seed=42)[:5]
    assert draw(tasks, 7, seed=0) != draw(tasks, 7, seed=42)
    assert sorted(draw(tasks, 99, seed=3)) == sorted(draw(tasks, None, seed=5)) == sorted(tasks)


@pytest.mark.parametrize(
    ("name", "row", "rule"),
    [
        ("gsm8k", {"prompt": "a"}, "id must be a string or a number; got None"),
        ("gsm8k", {"id": "a"}, "prompt must be a text that is not empty; got None"),
        ("gsm8k", {"id": "a", "prompt": " \n"}, "prompt must be a text that is not empty"),
        ("mt_bench", {"id": "a", "prompt": "a"}, "turns must be a list of two texts that are not empty; got None"),
        ("mt_bench", {"id": "a", "turns": ["a", ""]}, r"turns must be a list of two texts that are not empty; got \['a', ''\]"),
        ("mt_bench", {"id": "a", "turns": ["a", "b", "c"]}, "turns must be a list of two texts"),
        ("livecodebench", {"id": "a", "prompt": "a", "starter_code": 3}, "starter_code must be text; got 3"),
        ("gsm8k", {"id": "a", "prompt": "a \udc00"}, "is not valid UTF-8 text"),
        ("gsm8k", {"id": "\udc00", "prompt": "a"}, "is not valid UTF-8 text"),
        ("mt_bench", {"id": "a", "turns": ["a", "\ud83d b"]}, "is not valid UTF-8 text"),
        ("alpaca", ["a"], "must be a JSON object; got list"),
    ],
)
def test_a_bad_row_is_told_by_file_line_and_rule(tmp_path, name, row, rule):
    _write(tmp_path, name, {"id": "good", "prompt": "a", "turns": ["a", "b"]}, row)
    with pytest.raises(ValueError, match=rf"{name}.jsonl line 2:? {rule}"):
        read_tasks(name, tmp_path)


def test_missing_files_are_told_with_those_that_are_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no gsm8k.jsonl \(it holds no .jsonl files\)"):
        read_tasks("gsm8k", tmp_path)
    _write(tmp_path, "mbpp", {"id": 1, "prompt": "a"})
    _write(tmp_path, "alpaca")
    with pytest.raises(FileNotFoundError, match=r"has no gsm8k.jsonl \(it holds alpaca.jsonl, mbpp.jsonl\); write one JSON object a line"):
        read_tasks("gsm8k", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no gsm8k.jsonl \(it is not a directory\)"):
        read_tasks("gsm8k", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="alpaca holds no rows in"):
        read_tasks("alpaca", tmp_path)
    with pytest.raises(ValueError, match=r"benchmarks are gsm8k, .*; got gsm9k, mmlu"):
        check_names(["gsm9k", "mbpp", "mmlu"])
    with pytest.raises(ValueError, match="got none"):
        check_names([])


def test_the_hub_is_asked_for_the_published_rows(monkeypatch):
    rows = {
        "gsm8k": {"question": "How many?", "answer": "#### 3"},
        "math500": {"problem": "Solve.", "unique_id": "test/algebra/1.json"},
        "aime25": {"problem": "Find.", "problem_idx": 7},
        "humaneval": {"prompt": "def f():", "task_id": "HumanEval/0"},
        "mbpp": {"prompt": "Add.", "task_id": 11},
        "livecodebench": {"question_content": "Print.", "question_id": "1873_A", "starter_code": "class Solution:"},
        "mt_bench": {"prompt": ["Tell.", "Again."], "prompt_id": 81},
        "alpaca": {"instruction": "Name one.", "input": "red, blue"},
    }
    asked = []
    for name, row in rows.items():

        def load(*args, row=row, **kwargs):
            asked.append((*args, kwargs))
            return [row]

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
        (task,) = read_tasks(name, None)
        expected = {
            "livecodebench": (format_prompt(name, "Print.", starter_code="class Solution:"),),
            "mt_bench": ("Tell.", "Again."),
            "alpaca": ("Name one.\n\nInput:\nred, blue",),
        }
        prompt = row.get("question") or row.get("problem") or row.get("prompt")
        assert task.turns == expected.get(name, (format_prompt(name, str(prompt)),))
        ids = {"gsm8k": "gsm8k-0", "humaneval": "humaneval-HumanEval/0", "mt_bench": "mt-bench-81", "livecodebench": "livecodebench-1873_A"}
        assert task.id == ids.get(name, task.id)
    assert rows.keys() == BENCHMARKS.keys()
    assert asked[0] == ("openai/gsm8k", "main", {"split": "test"})
    assert asked[1] == ("HuggingFaceH4/MATH-500", None, {"split": "test"})
    assert asked[4] == ("google-research-datasets/mbpp", "sanitized", {"split": "test"})
    files = [f"hf://datasets/livecodebench/code_generation_lite/test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)]
    assert asked[5] == ("json", {"data_files": {"test": files}, "split": "test"})
    assert asked[6] == ("HuggingFaceH4/mt_bench_prompts", None, {"split": "train"})


def test_a_hub_that_cannot_be_read_is_told_with_what_to_do(monkeypatch):
    def load(*args, **kwargs):
        raise ConnectionError("no route to host\nmuch more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    with pytest.raises(ValueError, match=r"openai/gsm8k cannot be read from the hub \(no route to host\); .* --benchmark-dir DIR"):
        read_tasks("gsm8k", None)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *args, **kwargs: [{"question": None}]))
    with pytest.raises(ValueError, match="openai/gsm8k row 0: prompt must be a text"):
        read_tasks("gsm8k", None)
    monkeypatch.setitem(sys.modules, "datasets", None)  # not installed
    with pytest.raises(
        ValueError, match=r"install the extra hub \(pip install '\.\[hub\]'\), or give --benchmark-dir DIR, a folder with gsm8k.jsonl"
    ):
        read_tasks("gsm8k", None)
