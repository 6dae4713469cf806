"""What is killed at any moment goes on from what it had written: training and bench, through the command line."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from reanchor_jax import checkpoint

COMMAND = [sys.executable, "-c", "import sys; from reanchor_jax.cli import main; sys.exit(main())"]
STORIES = [
    "Once upon a time there was a cat who liked to play in the park with her friend Tom. They ran and ran until the sun went down."
] * 9


def run(arguments: list[str], *, killed_when=None) -> int:
    """Exit status of the command; with `killed_when`, of one that is killed as soon as that holds."""
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if killed_when is not None:
        while process.poll() is None and not killed_when():
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    told = process.communicate()[1]
    assert process.returncode in (0, -signal.SIGKILL), told[-3000:]
    return process.returncode


@pytest.fixture
def stories(tmp_path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"prompt": story}) + "\n" for story in STORIES))
    return path


def weights(out: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in checkpoint.leaves(checkpoint.load_drafter(out / "drafter")).items()}


@pytest.mark.slow
def test_training_killed_three_times_ends_with_the_weights_of_a_run_that_was_not(tmp_path, stories):
    sizes = "--num-sequences 12 --sequence-length 48 --longest-prompt 16 --num-held-out 1 --block-size 5 --num-layers 1 --window 16"
    steps = "--num-steps 40 --batch-size 2 --num-anchors 3 --checkpoint-steps 2 --evaluation-steps 10 --num-warmup 2"
    given = ["train", "--pair", "stories260k", "--prompts", str(stories), *sizes.split(), *steps.split(), "--out"]
    assert run([*given, str(tmp_path / "whole")]) == 0
    out, kills = tmp_path / "killed", 0
    checkpoints = out / "checkpoints"
    rng = random.Random(0)
    for after in (1, 11, 25):  # steps of which there must be a checkpoint

        def reached(after=after):
            steps = [int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdecimal()] if checkpoints.is_dir() else []
            if max(steps, default=0) < after:
                return False
            time.sleep(0.2 * rng.random())  # anywhere: in a step, while a checkpoint is written, while the log is
            return True

        kills += run([*given, str(out)], killed_when=reached) == -signal.SIGKILL
    assert kills == 3  # had it come to its end, nothing would have been tested
    assert run([*given, str(out)]) == 0
    whole, again = weights(tmp_path / "whole"), weights(out)
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps == [10, 20, 30, 40]


@pytest.mark.slow
def test_bench_killed_three_times_measures_every_prompt_once(tmp_path, stories):
    runs = tmp_path / "out" / "runs.jsonl"
    given = ["bench", "--pair", "stories260k", "--prompts", str(stories), "--max-new-tokens", "40", "--methods", "dflash,reanchor"]
    given += ["--out", str(tmp_path / "out")]
    kills = 0
    for after in (1, 7, 16):  # of 9 prompts by 3 methods

        def reached(after=after):
            return runs.exists() and runs.read_text().count("\n") >= after

        kills += run(given, killed_when=reached) == -signal.SIGKILL
    assert kills == 3
    assert run(given) == 0
    figures = json.loads((tmp_path / "out" / "results.json").read_text())
    assert figures["identical"]
    measured = [(line["method"], line["first"]) for line in map(json.loads, runs.read_text().splitlines())]
    assert sorted(measured) == sorted((method, first) for method in ("autoregressive", "dflash", "reanchor") for first in range(9))
