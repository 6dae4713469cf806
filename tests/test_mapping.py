"""A file of prompts: every prompt one line, equal to the prompt alone, whatever shared its batch and wherever the run was cut."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from lossless import BEST
from situations import flat, small_models
from tiny_text import VOCAB_SIZE, tokenizer_files

from reanchor_jax import autoregress, make_sampling
from reanchor_jax.cli import main
from reanchor_jax.generator import Generator
from reanchor_jax.mapping import map_prompts
from reanchor_jax.text import load_tokenizer

ASKED = {"max_new_tokens": 21, "do_sample": True, "top_k": 0, "eos_token_id": list(range(0, VOCAB_SIZE, 17))}


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return Generator(flat(small_models(3, vocab_size=VOCAB_SIZE)), tokenizer=load_tokenizer(folder), config=BEST)


def write_prompts(path, count, seed=0):
    """Prompts of 1 to 20 ids, now and then a text."""
    rng = np.random.default_rng(seed)
    records = [{"id": f"p{index}", "ids": rng.integers(VOCAB_SIZE, size=rng.integers(1, 21)).tolist()} for index in range(count)]
    for index in range(0, count, 5):
        records[index] = {"prompt": "a cat " * int(rng.integers(1, 3))}
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_lines_equal_plain_decoding(generator, source, lines, *, seed, asked):
    ids = [record.get("ids") or generator.encode(record["prompt"], None) for record in read(source)]
    tokens = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    plain = autoregress(
        generator.models,
        tokens,
        np.asarray([len(prompt) for prompt in ids]),
        jax.random.key(seed),
        config=BEST,
        sampling=make_sampling(len(ids), temperature=1.0 if asked.get("do_sample") else 0.0),
        max_new_tokens=asked["max_new_tokens"],
        stop_token_ids=asked["eos_token_id"],
    )
    assert sorted(line["index"] for line in lines) == list(range(len(ids)))
    for line in lines:
        row = line["index"]
        assert line["token_ids"] == plain.tokens[row, : int(plain.lengths[row])].tolist()
        assert line["finish_reason"] == ("running", "stop", "length")[int(plain.finish_reasons[row])]
        assert sum(line["acceptance_lengths"]) == len(line["token_ids"]) - 1


def test_every_prompt_has_one_line_that_is_its_text_alone(generator, tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", 23), tmp_path / "out.jsonl"
    told = map_prompts(generator, source, out, batch_size=4, seed=7, **ASKED)
    lines = read(out)
    assert_lines_equal_plain_decoding(generator, source, lines, seed=7, asked=ASKED)
    assert (told.num_rows, told.num_new, told.num_failed) == (23, 23, 0)
    assert told.num_tokens == sum(len(line["token_ids"]) for line in lines)
    assert [line["index"] for line in lines] != sorted(line["index"] for line in lines)  # rows made room as they ended
    assert lines[0]["tokens_per_second"] > 0
    # cut inside a line and missing others, it goes on with what is missing
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:9]) + whole[9][:30])
    assert map_prompts(generator, source, out, batch_size=4, seed=7, **ASKED).num_new == 14
    assert out.read_bytes().splitlines(keepends=True)[:9] == whole[:9]
    assert_lines_equal_plain_decoding(generator, source, read(out), seed=7, asked=ASKED)
    assert map_prompts(generator, source, out, batch_size=4, seed=7, **ASKED).num_new == 0
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        map_prompts(generator, source, out, batch_size=4, seed=8, **ASKED)


@pytest.mark.slow
def test_stop_strings_and_least_lengths_are_each_rows_own(generator, tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", 6), tmp_path / "out.jsonl"
    asked = {**ASKED, "min_length": 15, "stop_strings": ["a", "e", "\x00"]}
    map_prompts(generator, source, out, batch_size=4, **asked)
    for line in read(out):
        record = read(source)[line["index"]]
        prompt = record.get("ids") or record["prompt"]
        alone = map_alone(generator, prompt, line["index"], tmp_path / f"alone{line['index']}.jsonl", asked)
        names = ("token_ids", "text", "finish_reason")
        assert [line[name] for name in names] == [alone[name] for name in names]


def map_alone(generator, prompt, index, out, asked):
    """The line of one prompt at an index of its file, the others of which are done."""
    source = out.with_suffix(".in")
    content = {"prompt": prompt} if isinstance(prompt, str) else {"ids": prompt}
    source.write_text('{"ids": [1]}\n' * index + json.dumps(content) + "\n")
    out.write_text("".join(f'{{"index": {done}}}\n' for done in range(index)))
    map_prompts(generator, source, out, batch_size=1, **asked)
    return read(out)[-1]


def test_a_prompt_that_cannot_be_has_a_line_that_says_why_and_the_others_go_on(generator, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    records = [
        {"ids": [1, 2]},
        {"ids": [1] * 60, "id": "long"},
        {"ids": [VOCAB_SIZE]},
        {"ids": [1], "prompt": "a"},
        {"prompt": 3},
        {"ids": []},
    ]
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    told = map_prompts(generator, source, out, batch_size=2, **ASKED)
    assert told.num_failed == 5
    errors = {line["index"]: line["error"] for line in read(out) if "error" in line}
    assert "in.jsonl line 2: prompt (60) + max_new_tokens (21) exceed cache_length" in errors[1]
    assert "outside the target's vocabulary" in errors[2]
    assert errors[3] == errors[4].replace("line 5", "line 4")
    assert "at least one token" in errors[5]
    out.write_text('{"index": 0}\n{"index": 0}\n')
    with pytest.raises(ValueError, match=r"out\.jsonl line 2 must hold index, a number no line before it has; got 0"):
        map_prompts(generator, source, out, batch_size=2, **ASKED)
    with pytest.raises(ValueError, match="one text a prompt: leave out num_return_sequences"):
        map_prompts(generator, source, out, output_scores=True)


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import conftest
from lossless import BEST
from situations import flat, small_models
from tiny_text import VOCAB_SIZE
from reanchor_jax.generator import Generator
from reanchor_jax.mapping import map_prompts
from reanchor_jax.text import load_tokenizer
from test_mapping import ASKED

folder = Path(sys.argv[1])
generator = Generator(flat(small_models(3, vocab_size=VOCAB_SIZE)), tokenizer=load_tokenizer(folder), config=BEST)
map_prompts(generator, folder / "in.jsonl", folder / "out.jsonl", batch_size=8, seed=7, **ASKED)
"""


@pytest.mark.slow
def test_a_thousand_prompts_killed_three_times_have_one_line_each(generator, tmp_path):
    for name, content in tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    source, out = write_prompts(tmp_path / "in.jsonl", 1000), tmp_path / "out.jsonl"
    rng, kills = random.Random(3), 0
    while True:
        before = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stderr=subprocess.PIPE)
        more = rng.randint(2_000, 60_000)
        while kills < 3 and process.poll() is None and (out.stat().st_size if out.exists() else 0) < before + more:
            time.sleep(0.005)
        if kills < 3 and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
            process.communicate()
            continue
        told = process.communicate()[1].decode()
        assert process.returncode == 0, told[-2000:]
        break
    assert kills == 3
    assert_lines_equal_plain_decoding(generator, source, read(out), seed=7, asked=ASKED)


@pytest.mark.slow
def test_the_command_maps_a_file_and_tells_what_it_did(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "Once upon a time"}\n{"prompt": ""}\n{"ids": [1, 403]}\n')
    given = ["map", "--pair", "stories260k", "--prompts", str(source), "--out", str(out), "--method", "dflash", "--max-new-tokens", "9"]
    given += ["--batch-size", "2", "--cache-length", "64"]
    assert main(given) == 0
    told = capsys.readouterr().out
    assert f"written: {out}, 3 lines, 3 of them now: 18 tokens" in told
    assert "1 could not be completed" in told
    lines = {line["index"]: line for line in read(out)}
    assert lines[0]["text"].startswith(", there was a")
    assert "the prompt is empty" in lines[1]["error"]
    assert main(given) == 0
    assert "3 lines, 0 of them now" in capsys.readouterr().out
    assert main([*given[:-6], "--out", str(source)]) == 2
    assert "is the prompts file itself" in capsys.readouterr().err
