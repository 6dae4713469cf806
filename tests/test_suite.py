"""Benchmarks are measured each in a folder of its own, second turns hold plain decoding's answers, the sum is what the folders hold."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handmade import PLAIN, arm, made_profile
from tiny_text import tokenizer_files

from reanchor_jax import checkpoint, cli, pairs
from reanchor_jax.bench import charts, compare, preflight, profiles, suite
from reanchor_jax.bench.benchmarks import Task
from reanchor_jax.bench.compare import BASELINE, CHAIN, Run
from reanchor_jax.bench.measure import weights_digest
from reanchor_jax.bench.methods import Outcome, Request, method_config, temperature_name
from reanchor_jax.bench.tables import benchmark_tables
from reanchor_jax.decoding.loop import autoregress
from reanchor_jax.decoding.sampling import make_sampling
from reanchor_jax.statistics import ROUND_FIELDS
from reanchor_jax.streaming import continuation
from reanchor_jax.text import encode, encode_turns, load_tokenizer

_TURNS = [["Once upon a time, there was", "The dog was {happy}."], ["Lily liked", "Then a cat came."], ["a" * 600, "Tim ran."]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    texts = ["Once upon a time", "Tom had a ball.", "One day, a big bear", "Sue saw", "The sun was hot."]
    files = {
        "gsm8k": [{"id": f"gsm8k-{index}", "prompt": text} for index, text in enumerate(texts)],
        "mt_bench": [{"id": f"mt-bench-{81 + index}", "turns": turns} for index, turns in enumerate(_TURNS)],
        "aime25": [{"id": "long", "prompt": "b" * 600}],
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def _bench(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main(["bench", "--pair", "stories260k", *map(str, arguments)])
    told = capsys.readouterr()
    return status, told.out, told.err


def _json(path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_benchmarks_are_measured_summed_up_and_resumed(capsys, rows, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ("--benchmarks", "mt_bench,gsm8k,aime25", "--benchmark-dir", rows, "--num-examples", 3, "--max-new-tokens", 11)
    arguments = (
        *arguments,
        "--seed",
        5,
        "--temperatures",
        "0,1",
        "--methods",
        "dflash",
        "--cache-length",
        512,
        "--preflight",
        "--out",
        out,
    )
    status, told, err = _bench(capsys, *arguments)
    assert status == 0, err
    assert "MT-Bench, temperature 0: 4 prompts, 2 left out: longer than the 501 tokens that fit" in err
    assert "AIME25, temperature 1: 0 prompts, 1 left out" in err
    assert told.count("preflight: rounds of dflash") == 2

    summary = _json(out / "results.json")
    names = ["gsm8k", "aime25", "mt_bench"]  # in the paper's order, by temperature
    assert [(run["benchmark"], run["temperature"]) for run in summary["runs"]] == [(name, t) for t in (0.0, 1.0) for name in names]
    assert [(run["num_prompts"], run["num_skipped"]) for run in summary["runs"][:3]] == [(3, 0), (0, 1), (4, 2)]
    table = (out / "tables.md").read_text()
    assert table in told
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| dflash")]
    for temperature, line in enumerate(lines):
        found = [_json(out / name / f"T{temperature}" / "results.json") for name in ("gsm8k", "mt_bench")]
        pairs_ = [(figures["methods"]["dflash"]["tau"], figures["speedup"]["dflash"]) for figures in found]
        cells = [f"{tau:.2f} / {speedup:.2f}x" for tau, speedup in [*pairs_, np.mean(pairs_, axis=0)]]
        assert line == ["dflash", cells[0], "-", cells[1], cells[2]]
    assert "| prompts | 3 | 0 (1 left out) | 4 (2 left out) | 7 |" in table
    assert (out / "benchmarks.png").read_bytes()[:4] == b"\x89PNG"

    models, tokenizer = pairs.load_pair("stories260k"), load_tokenizer(pairs.path("stories260k"))
    for temperature in (0, 1):
        folder = out / "mt_bench" / f"T{temperature}"
        figures = _json(folder / "results.json")
        first, second = figures["prompts"][:2], figures["prompts"][2:]
        assert sorted(first) == ["mt-bench-81/1", "mt-bench-82/1"]
        assert second == [name.replace("/1", "/2") for name in first]
        assert figures["skipped"] == ["mt-bench-83/1", "mt-bench-83/2"]
        asked = _json(folder / "settings.json")["prompts"]
        runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
        plain = {run["first"]: run["outcomes"][0]["tokens"] for run in runs if run["method"] == BASELINE}
        for index, name in enumerate(first):
            turns = _TURNS[int(name[9:11]) - 81]
            assert asked[index] == encode(tokenizer, turns[0])
            answer = autoregress(
                models,
                jnp.asarray([asked[index]], jnp.int32),
                jnp.asarray([len(asked[index])], jnp.int32),
                jax.random.fold_in(jax.random.key(5), index)[None],
                config=method_config(BASELINE, models, asked, request=Request(max_new_tokens=11)),
                sampling=make_sampling(1, temperature=temperature),
                max_new_tokens=11,
            )
            tokens = np.asarray(answer.tokens)[0, : int(answer.lengths[0])].tolist()
            assert plain[index] == tokens
            text = "\n\n".join([turns[0], continuation(tokenizer, asked[index], tokens) or "", turns[1]])
            assert asked[2 + index] == encode(tokenizer, text)

    # interrupted before the last benchmark had its figures: only these are made again
    (out / "mt_bench" / "T1" / "results.json").unlink()
    (out / "results.json").unlink()
    monkeypatch.setattr(compare, "run_rounds", lambda *_, **__: pytest.fail("a finished run was repeated"))
    status, _, err = _bench(capsys, *arguments)
    assert status == 0, err
    again = _json(out / "results.json")
    assert [run["methods"] for run in again["runs"]] == [run["methods"] for run in summary["runs"]]
    assert again["means"] == summary["means"]
    # answers made with other settings are refused
    status, _, err = _bench(capsys, *arguments, "--top-k", 7)
    assert status == 2
    assert "holds a run with other settings (top_k)" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--benchmarks", "gsm8k", "--prompts", "x.jsonl"), "not allowed with argument"),
        ((), "one of the arguments --prompts --benchmarks is required"),
        (("--benchmarks", "gsm9k"), "benchmarks are gsm8k, math500, .* alpaca; got gsm9k"),
        (("--benchmarks", ","), "got none"),
        (("--benchmarks", "mbpp", "--benchmark-dir", "ROWS"), r"has no mbpp.jsonl \(it holds aime25.jsonl, gsm8k.jsonl, mt_bench.jsonl\)"),
        (("--benchmarks", "gsm8k", "--benchmark-dir", "ROWS", "--methods", "eagle"), "unknown method 'eagle'"),
        (("--benchmarks", "gsm8k", "--benchmark-dir", "ROWS", "--max-new-tokens", "512"), "exceed the 512 positions"),
        (
            ("--benchmarks", "gsm8k", "--benchmark-dir", "ROWS", "--thinking", "off"),
            "gsm8k-0: thinking is a chat template's",
        ),
        (("--benchmarks", "gsm8k", "--benchmark-dir", "ROWS", "--chat"), "gsm8k-0: the tokenizer has no chat template"),
        (("--benchmarks", "gsm8k", "--traces", "dflash"), "--traces and --peers go with --prompts"),
        (("--benchmarks", "gsm8k", "--temperatures", "0,hot"), "must be numbers with commas between; got '0,hot'"),
        (("--benchmarks", "gsm8k", "--temperatures", "0,1", "--temperature", "1"), "either --temperature or --temperatures"),
        (("--benchmarks", "gsm8k", "--benchmark-dir", "ROWS", "--temperatures", "0,-1"), "temperature must be 0 or more; got -1.0"),
        (("--prompts", "x.jsonl", "--thinking", "on", "--temperatures", "0,1"), "--temperatures, --thinking goes with --benchmarks"),
        (("--prompts", "none.jsonl"), "none.jsonl: No such file"),
    ],
)
def test_mistakes_are_told_before_anything_is_run(capsys, rows, tmp_path, monkeypatch, arguments, told):
    monkeypatch.setattr(compare, "run_rounds", lambda *_, **__: pytest.fail("something was run"))
    monkeypatch.setattr(cli.benchmarks, "draw", lambda tasks, count, seed: tasks)
    given = [str(rows) if argument == "ROWS" else argument for argument in arguments]
    status, _, err = _bench(capsys, *given, "--out", tmp_path / "out")
    assert status == 2
    assert re.search(told, err), err
    assert not (tmp_path / "out").exists()


def _run(first, accepted, *, finish_reason="stop", method=CHAIN) -> Run:
    rounds = {name: [0] * len(accepted) for name in ROUND_FIELDS}
    rounds |= {"num_accepted": accepted, "num_emitted": [count + 1 for count in accepted]}
    outcome = Outcome(tokens=list(range(1 + sum(accepted) + len(accepted))), finish_reason=finish_reason, rounds=rounds)
    return Run(method, first, 0.0, 1.0, 1.0, [outcome])


def test_a_preflight_tells_the_ceiling_of_responses_that_ended_and_what_it_says():
    models = pairs.load_pair("stories260k")  # blocks of 16
    many = {
        "GSM8K": [_run(0, [15, 0, 3, 15]), _run(1, [15] * 9, finish_reason="length"), _run(0, [0] * 9, method=BASELINE)],
        "MBPP": [_run(0, [1, 2, 15, 3])],
    }
    lines = preflight.report(many, models=models, temperature=0.0)
    assert lines[0] == "preflight: rounds of dflash at temperature 0 by accepted drafts"
    assert lines[1].splitlines()[-1].split()[0] == "15+"
    assert lines[1].splitlines()[-1].endswith(" 37.5%")
    assert lines[2] == "Counted: the 2 of 3 responses that ended by themselves."
    assert lines[3] == "Ceiling: 37.5% of 8 rounds accept the whole block of 16 (GSM8K 50.0%, MBPP 25.0%)."
    assert lines[4].startswith("That is at or above 15%: the block is what limits, a longer one is worth training (train --recipe dbloom ")
    assert lines[4].endswith("The threshold is ours, DBloom names none.")
    assert lines[5:] == ["8 rounds say little: ask for more prompts or tokens."]
    longer = models._replace(drafter=checkpoint.load_drafter(pairs.path("stories260k/dbloom")))
    told = preflight.report({"MBPP": [_run(0, [23] * 201)]}, models=longer, temperature=0.5)
    assert "worth training (train --start THIS --old-slots 23 and a longer --block-size)" in told[4]
    assert told[5:] == ["DBloom's test is greedy; above temperature 0 fewer drafts are accepted, whatever the block."]
    headed = models._replace(drafter=checkpoint.load_drafter(pairs.path("stories260k/domino")))
    told = preflight.report({"MBPP": [_run(0, [15] * 201)]}, models=headed, temperature=0.0)
    assert "worth training (train --start THIS --old-slots 15, its --family and a longer --block-size)" in told[4]
    few = preflight.report({"MBPP": [_run(0, [15] + [2] * 9, finish_reason="length")]}, models=models, temperature=1.0)
    assert few[2].startswith("None of 1 responses ended by itself, so all count")
    assert few[4].startswith("That is below 15%: the drafter errs before the block ends, a longer one is not worth training.")
    assert preflight.report({"MBPP": [_run(0, [])]}, models=models, temperature=0.0)[0].startswith("preflight: the chain made no rounds")


def test_a_second_turn_holds_plain_decodings_answer_which_is_made_once(tmp_path, monkeypatch):
    models, tokenizer = pairs.load_pair("stories260k"), load_tokenizer(pairs.path("stories260k"))
    chat = suite.Chat(tokenizer=tokenizer, is_wrapped=False, thinking=None)
    tasks = [Task("a", tuple(_TURNS[0])), Task("b", tuple(_TURNS[1]))]
    firsts = [chat.prompt(f"{task.id}/1", task.turns[:1]) for task in tasks]
    request = Request(max_new_tokens=7, temperature=1.0, seed=3)

    def prompts():
        suite._pin_prompts(models, tasks, firsts, request=request, folder=tmp_path, model_name="m")
        return suite._prompts(models, chat, tasks, firsts, request=request, folder=tmp_path, model_name="m")

    found, skipped = prompts()
    assert ([prompt.id for prompt in found], skipped) == (["a/1", "b/1", "a/2", "b/2"], [])
    runs = compare.read_runs(tmp_path / "turns.jsonl", num_prompts=2, batch_size=1)
    for run in runs:
        answer = continuation(tokenizer, firsts[run.first].ids, run.outcomes[0].tokens)
        assert answer
        assert found[2 + run.first].ids == encode(tokenizer, "\n\n".join([_TURNS[run.first][0], answer, _TURNS[run.first][1]]))
    monkeypatch.setattr(compare, "run_rounds", lambda *_, **__: pytest.fail("an answer was made again"))
    assert prompts() == (found, [])
    request = Request(max_new_tokens=7, temperature=1.0, seed=4)
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        prompts()


def test_other_prompts_of_a_later_benchmark_are_refused_before_an_earlier_one_is_run(tmp_path, monkeypatch):
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    monkeypatch.setattr(suite, "measure", lambda *_, **__: pytest.fail("a benchmark was run"))
    arguments = dict(requests={"": Request(max_new_tokens=5)}, out=tmp_path, model_name="m")
    tasks = {"gsm8k": [Task("a", ("Once",))], "alpaca": [Task("b", ("Tom had",))]}
    with pytest.raises(pytest.fail.Exception):
        suite.run_suite(models, chat, tasks, [BASELINE, CHAIN], **arguments)
    tasks["alpaca"] = [Task("b", ("Sue had",))]
    with pytest.raises(ValueError, match=r"alpaca.* other settings \(prompts\)"):
        suite.run_suite(models, chat, tasks, [BASELINE, CHAIN], **arguments)


def test_other_weights_under_the_same_name_are_refused(tmp_path, monkeypatch):
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    monkeypatch.setattr(suite, "measure", lambda *_, **__: pytest.fail("a benchmark was run"))
    arguments = dict(requests={"": Request(max_new_tokens=5)}, out=tmp_path, model_name="m")
    tasks = {"gsm8k": [Task("a", ("Once",))]}
    with pytest.raises(pytest.fail.Exception):
        suite.run_suite(models, chat, tasks, [BASELINE, CHAIN], **arguments)
    changed = {
        path: value.at[..., 0].add(1e-6) if path == "norm/scale" else value for path, value in checkpoint.leaves(models.drafter).items()
    }
    other = models._replace(drafter=checkpoint.with_leaves(models.drafter, changed))
    with pytest.raises(ValueError, match=r"other settings \(weights.drafter\)"):
        suite.run_suite(other, chat, tasks, [BASELINE, CHAIN], **arguments)
    longer = checkpoint.build_drafter(replace(models.drafter.config, num_slots=24, num_drafts=23), jnp.float32)
    longer = models._replace(drafter=checkpoint.with_leaves(longer, checkpoint.leaves(models.drafter)))
    digests = [weights_digest(found) for found in (models, other, longer, models._replace(drafter=None))]
    assert len({found["drafter"] for found in digests}) == 4
    assert len({found["target"] for found in digests}) == 1
    assert weights_digest(models) == weights_digest(pairs.load_pair("stories260k"))


def test_a_changed_second_turn_is_refused_before_anything_is_run(tmp_path):
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    request = Request(max_new_tokens=7)
    for turns, is_refused in ((_TURNS[0], False), (_TURNS[0], False), ([_TURNS[0][0], "Something else."], True)):
        tasks = [Task("a", tuple(turns))]
        given = dict(requests={"": request}, out=tmp_path, model_name="m")
        if is_refused:
            with pytest.raises(ValueError, match=r"other settings \(second_turns\)"):
                suite._prepare(models, chat, {"mt_bench": tasks}, [BASELINE], **given)
        else:
            suite._prepare(models, chat, {"mt_bench": tasks}, [BASELINE], **given)


def _wrong(*names):
    """Figures of MT-Bench that hold nonsense under these names."""
    found = {"tau": 2.0, "tau_standard_error": 0.0, "identical": True, "target_passes": 9}
    figures = {"benchmark": "mt_bench", "temperature": 0.0, "prompts": ["a"], "skipped": [], "environment": None}
    figures |= {"methods": {CHAIN: found}, "speedup": {CHAIN: 2.0}}
    return json.dumps(figures | {name: {CHAIN: "x"} for name in names})


@pytest.mark.parametrize(
    "content",
    [
        '{"benchmark": "mt_bench"}',
        '{"benchmark": "mt_bench", "temper',
        "[1]",
        *map(_wrong, ("temperature", "methods", "speedup", "environment")),
    ],
)
def test_a_damaged_summary_of_another_benchmark_is_told_before_anything_is_run(tmp_path, content):
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / "mt_bench" / "results.json").write_text(content)
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    with pytest.raises(ValueError, match=r"mt_bench.results.json is damaged; remove it and ask for mt_bench again"):
        suite.run_suite(
            models,
            chat,
            {"gsm8k": [Task("a", ("Once",))]},
            [BASELINE],
            requests={"": Request(max_new_tokens=5)},
            out=tmp_path,
            model_name="m",
        )
    (tmp_path / "mt_bench" / "results.json").write_text(_wrong())
    assert suite.write_summary(tmp_path, model_name="m")["means"] == {"0": {CHAIN: {"tau": 2.0, "speedup": 2.0}}}


def test_figures_that_cannot_be_written_are_told_before_anything_is_run(tmp_path, monkeypatch):
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    monkeypatch.setattr(suite, "measure", lambda *_, **__: pytest.fail("a benchmark was run"))
    tasks = {"gsm8k": [Task("a", ("Once",))], "alpaca": [Task("b", ("Tom had",))]}
    given = dict(requests={"": Request(max_new_tokens=5)}, model_name="m")
    for place in ("one/results.json", "two/tables.md", "three/alpaca/results.json", "four/alpaca/runs.jsonl"):
        (tmp_path / place).mkdir(parents=True)
        with pytest.raises(IsADirectoryError, match=place):
            suite.run_suite(models, chat, tasks, [BASELINE], out=tmp_path / place.split("/")[0], **given)
    (tmp_path / "many" / "results.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"many.results\.json"):
        suite.run_suites({"dflash": models}, chat, tasks, [BASELINE], out=tmp_path / "many", **given)


@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_charts_are_said_to_be_left_out_where_matplotlib_is_missing(tmp_path, capsys, monkeypatch, has_matplotlib):
    monkeypatch.setattr(charts, "has_matplotlib", lambda: has_matplotlib)
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    tasks = {"gsm8k": [Task("long", ("b" * 600,))]}  # which does not fit, so there is nothing to run or to draw
    suite.run_suite(models, chat, tasks, [BASELINE, CHAIN], requests={"": Request(max_new_tokens=5)}, out=tmp_path, model_name="m")
    assert ("no charts: they need matplotlib; install the extra bench" in capsys.readouterr().err) is not has_matplotlib


def test_different_temperatures_have_different_names():
    assert [temperature_name(value) for value in (0.0, -0.0, 1.0, 0.7, 1.0000001, 0.1 + 0.2)] == [
        "0",
        "0",
        "1",
        "0.7",
        "1.0000001",
        "0.30000000000000004",
    ]


def test_summaries_of_drafters_are_joined_in_one_table():
    taus = {BASELINE: 1.0, CHAIN: 3.0, "reanchor": 4.0, "ddtree": 5.0}
    others = {BASELINE: 1.0, CHAIN: 2.0, "reanchor": 2.5}
    # of Alpaca the second had other prompts, MBPP it never saw: neither is a column, nor part of the means
    first = [_summary_run(name, 0.0, taus) for name in ("gsm8k", "alpaca", "mbpp")]
    second = [_summary_run("gsm8k", 0.0, others, identical=False), {**_summary_run("alpaca", 0.0, others), "num_prompts": 5}]
    joined = suite.join_drafters({"domino": {"runs": first}, "dspark": {"runs": second}})
    table = benchmark_tables({"model": "m", **joined}, title="m").splitlines()
    rows = [line for line in table if line.startswith(("| method", "| d", "| auto"))]
    assert rows == [
        "| method | GSM8K | mean |",
        "| autoregressive | 1.00 / 0.50x | 1.00 / 0.50x |",
        "| domino | 3.00 / 1.50x | 3.00 / 1.50x |",
        "| domino + ReAnchor | 4.00 / 2.00x | 4.00 / 2.00x |",
        "| domino ddtree | 5.00 / 2.50x | 5.00 / 2.50x |",
        "| dspark | 2.00 / 1.00x | 2.00 / 1.00x |",
        "| dspark + ReAnchor | 2.50 / 1.25x | 2.50 / 1.25x |",
    ]
    assert "dspark + ReAnchor on GSM8K at temperature 0: output differs, see dspark/gsm8k." in table


def test_nothing_of_several_drafters_is_run_before_all_that_can_be_refused_is(capsys, rows, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(suite, "measure", lambda *_, model_name, **__: asked.append(model_name) or pytest.fail("a benchmark was run"))
    pair = tmp_path / "mine"
    shutil.copytree(pairs.path("stories260k"), pair, ignore=shutil.ignore_patterns("drafters"))
    given = ("--benchmarks", "gsm8k", "--benchmark-dir", rows, "--num-examples", 2, "--max-new-tokens", 9, "--methods", "reanchor")
    domino, other = pairs.path("stories260k/domino"), tmp_path / "dbloom"
    shutil.copytree(pairs.path("stories260k/dbloom"), other)
    given = (*given, "--drafters", f"{domino},{other}")

    def bench(*more) -> str:
        asked.clear()
        try:
            status = cli.main(["bench", *map(str, (*given, *more))])
        except pytest.fail.Exception:
            return ""
        assert (status, asked) == (2, [])
        return capsys.readouterr().err

    out = tmp_path / "out"
    assert "--drafters goes with --pair" in bench("--target", pair, "--out", out)
    assert "either --drafter or --drafters" in bench("--pair", pair, "--drafter", other, "--out", out)
    assert "num_nodes (20) must hold the baseline block of 24" in bench("--pair", pair, "--num-nodes", 20, "--out", out)
    profile = tmp_path / "profile.json"  # of the first drafter, whose shape is not the second's
    models = pairs.load_pair("stories260k")._replace(drafter=checkpoint.load_drafter(domino))
    arms = (arm(PLAIN, 1.0), arm({"num_blocks": 1, "num_nodes": 16, "is_chain": True}, 2.0, (2.0, 1.5)))
    profiles.write_profile(profile, made_profile(key=profiles.profile_key(models), rows=(1,), contexts=(10,), arms=(arms,)))
    assert "profile.json was measured with models" in bench("--pair", pair, "--profile", profile, "--out", out)
    assert not out.exists()

    assert bench("--pair", pair, "--out", out) == ""
    assert asked == ["mine with domino"]
    assert sorted(path.name for path in out.iterdir()) == ["dbloom", "domino"]
    shutil.rmtree(other)
    shutil.copytree(pairs.path("stories260k/draft-opd"), other)  # another drafter of the same name
    assert "dbloom holds a run with other settings (weights.drafter)" in bench("--pair", pair, "--out", out)


@pytest.mark.slow
def test_several_drafters_are_measured_each_in_its_folder_and_joined(capsys, rows, tmp_path):
    out = tmp_path / "out"
    given = ("--benchmarks", "gsm8k", "--benchmark-dir", rows, "--num-examples", 2, "--max-new-tokens", 9, "--methods", "dflash,reanchor")
    status, told, err = _bench(capsys, *given, "--drafters", "domino,dspark", "--cache-length", 128, "--out", out)
    assert status == 0, err
    table = (out / "tables.md").read_text()
    assert table in told
    for name in ("domino", "dspark"):
        figures = _json(out / name / "gsm8k" / "results.json")["methods"]
        for method, label in ((CHAIN, name), ("reanchor", f"{name} + ReAnchor")):
            assert f"| {label} | {figures[method]['tau']:.2f} / " in table
    status, _, err = _bench(capsys, "--prompts", "x.jsonl", "--drafters", "domino", "--out", out)
    assert (status, "--drafters goes with --benchmarks" in err) == (2, True)


def test_answers_that_all_end_at_their_first_token_count_in_no_mean(tmp_path):
    for name, tau, passes in (("gsm8k", 3.0, 4), ("alpaca", 2.0, 5), ("mbpp", 0.0, 0)):
        found = {"tau": tau, "tau_standard_error": 0.0, "identical": True, "target_passes": passes}
        figures = {"benchmark": name, "temperature": 0.0, "prompts": ["a"], "skipped": []}
        figures |= {"methods": {BASELINE: found, CHAIN: found}, "speedup": {BASELINE: 1.0, CHAIN: 2.0 if passes else None}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(figures))
    summary = suite.write_summary(tmp_path, model_name="m")
    assert summary["means"]["0"][CHAIN] == {"tau": 2.5, "speedup": 2.0}
    assert "| dflash | 3.00 / 2.00x | - | 2.00 / 2.00x | 2.50 / 2.00x |" in (tmp_path / "tables.md").read_text()
    assert [bar.get_height() for bar in charts.draw_taus(summary).axes[0].patches] == [3.0, 2.0]


def _summary_run(benchmark, temperature, taus, *, identical=True):
    methods = {name: {"tau": tau, "tau_standard_error": 0.1, "identical": identical, "speedup": tau / 2} for name, tau in taus.items()}
    return {
        "benchmark": benchmark,
        "temperature": temperature,
        "folder": benchmark,
        "num_prompts": 7,
        "num_skipped": 0,
        "methods": methods,
        "environment": None,
    }


def test_tables_and_bars_show_a_method_where_it_was_measured():
    runs = [
        _summary_run("gsm8k", 0.0, {BASELINE: 1.0, CHAIN: 3.0, "reanchor": 4.0}),
        _summary_run("alpaca", 0.0, {BASELINE: 1.0, CHAIN: 2.0}, identical=False),
        _summary_run("gsm8k", 0.5, {BASELINE: 1.0, CHAIN: 2.5}),
    ]
    means = {"0": {CHAIN: {"tau": 2.5, "speedup": 1.25}, "reanchor": {"tau": None, "speedup": None}}, "0.5": {}}
    summary = {"model": "m", "runs": runs, "means": means}
    table = benchmark_tables(summary, title="m").splitlines()
    assert "| method | GSM8K | Alpaca | mean |" in table
    assert "| dflash | 3.00 / 1.50x | 2.00 / 1.00x | 2.50 / 1.25x |" in table
    assert "| reanchor | 4.00 / 2.00x | - | - |" in table
    assert "dflash on Alpaca at temperature 0: output differs, see alpaca." in table
    cold, warm = charts.draw_taus(summary).axes
    assert [bar.get_height() for bar in cold.patches] == [3.0, 2.0, 4.0]
    assert [bar.get_height() for bar in warm.patches] == [2.5]
    assert [label.get_text() for label in cold.get_xticklabels()] == ["GSM8K", "Alpaca"]


def test_a_chat_template_wraps_every_turn_and_is_told_whether_to_think(tmp_path):
    """z-lab/dflash#133, #60 (half the drafts lost by thinking where the drafter does not)"""
    for name, content in tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[me]"
        "{% if enable_thinking is defined %}{{ 'think' if enable_thinking else 'no' }}{% endif %}"
    )
    for thinking, end in ((None, ""), (True, "think"), (False, "no")):
        chat = suite.Chat(tokenizer=tokenizer, is_wrapped=True, thinking=thinking)
        prompt = chat.prompt("a/2", ["a cat", "sat", "on"])
        assert tokenizer.decode(prompt.ids, skip_special_tokens=True) == f"[user]a cat[assistant]sat[user]on[me]{end}"
    assert encode_turns(tokenizer, ["a", "b"], is_chat=False) == encode(tokenizer, "a\n\nb")
    with pytest.raises(ValueError, match="leave out --thinking"):
        encode_turns(tokenizer, ["a"], is_chat=False, thinking=True)


def test_a_cache_that_is_asked_for_limits_prompts_too():
    models = pairs.load_pair("stories260k")
    chat = suite.Chat(tokenizer=load_tokenizer(pairs.path("stories260k")), is_wrapped=False, thinking=None)
    tasks = [Task("short", ("Once",)), Task("long", ("Once upon a time " * 9,))]
    firsts = [chat.prompt(task.id, task.turns) for task in tasks]
    request = Request(max_new_tokens=50, cache_length=64)
    prompts, skipped = suite._prompts(models, chat, tasks, firsts, request=request, folder=Path("unused"), model_name="m")
    assert ([prompt.id for prompt in prompts], skipped) == (["short"], ["long"])
