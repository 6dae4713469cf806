"""Command line: the files it writes, what it says to a user's mistake, what it leaves behind."""

import json
import os
import re
import shutil
import sys
import threading

import jax
import pytest
from handmade import CHAIN, PLAIN, arm, made_profile
from tiny import random_models, tiny_drafter_config, tiny_llama_config
from tiny_text import SENTENCE, VOCAB_SIZE, tokenizer_files

from reanchor_jax import checkpoint, cli, pairs
from reanchor_jax.bench import compare, demo, methods, profiles
from reanchor_jax.bench.methods import Request, method_config
from reanchor_jax.convert.engine import export_huggingface
from reanchor_jax.training import recipe

_PROMPTS = '{"prompt": "Once upon", "id": "a"}\n{"ids": [7, 9, 11, 13, 17]}\n{"prompt": "the cat"}\n'


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A random pair with a tokenizer, in our layout."""
    target = tiny_llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    drafter = tiny_drafter_config(target, block_size=3)
    folder = tmp_path_factory.mktemp("pair") / "pair"
    models = random_models(target, drafter, seed=1)
    return checkpoint.save(folder, models, target_config=target, drafter_config=drafter, files=tokenizer_files())


@pytest.fixture(scope="module")
def target_only(pair, tmp_path_factory):
    """The pair's target without tokenizer and drafter."""
    folder = tmp_path_factory.mktemp("target") / "target"
    found = checkpoint.read_contents(pair)
    assert found.target_config is not None
    return checkpoint.save(folder, checkpoint.load(pair)._replace(drafter=None), target_config=found.target_config)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(_PROMPTS)
    return file


def _run(capsys, *arguments) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_generate_writes_results_that_equal_autoregression_whatever_the_method_and_batch(capsys, pair, prompts, tmp_path):
    common = ("--prompts", prompts, "--max-new-tokens", 9, "--temperature", 0.9, "--seed", 4, "--ignore-eos")
    file = tmp_path / "out.json"
    status, out, err = _run(capsys, "generate", "--pair", pair, "--method", "dflash", "--batch-size", 2, "--json", file, *common)
    assert (status, out, err) == (0, "", "")
    status, out, _ = _run(capsys, "generate", "--target", pair, "--json", "-", *common)  # no drafter: autoregressive
    assert status == 0
    plain, fast = json.loads(out)["results"], json.loads(file.read_text())["results"]
    assert [result["tokens"] for result in plain] == [result["tokens"] for result in fast]
    assert [result["text"] for result in plain] == [result["text"] for result in fast]
    assert [(result["id"], result["prompt"]) for result in fast] == [("a", "Once upon"), ("1", None), ("2", "the cat")]
    for result in fast:
        assert list(result) == ["id", "prompt", "text", "tokens", "acceptance_lengths", "finish_reason", "tau", "target_passes"]
        assert (len(result["tokens"]), result["finish_reason"]) == (9, "length")
        assert 1 + sum(result["acceptance_lengths"]) == 9
        assert result["target_passes"] == len(result["acceptance_lengths"])
        assert result["tau"] == pytest.approx(8 / result["target_passes"])
    assert [result["tau"] for result in plain] == [1.0] * 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_text_without_json_is_what_json_holds(capsys, pair, prompts):
    arguments = ("generate", "--target", pair, "--max-new-tokens", 9, "--ignore-eos")
    status, out, _ = _run(capsys, *arguments, "--prompts", prompts, "--json", "-")
    assert status == 0
    texts = [result["text"] for result in json.loads(out)["results"]]
    status, out, err = _run(capsys, *arguments, "--prompts", prompts)
    assert (status, out) == (0, "".join(f"── {name}\n{text}\n" for name, text in zip(("a", "1", "2"), texts, strict=True)))
    status, out, err = _run(capsys, *arguments, "--prompt", "Once upon")
    assert (status, out) == (0, texts[0] + "\n")
    assert err == "[9 tokens, 8 target passes, 1.00 tokens a pass, ended by length]\n"


def test_a_hugging_face_directory_is_converted_on_the_way(capsys, pair, prompts, tmp_path):
    raw = export_huggingface(pair, tmp_path / "raw")
    arguments = ("--prompts", prompts, "--max-new-tokens", 3, "--json", "-")
    status, expected, _ = _run(capsys, "generate", "--target", pair, *arguments)
    assert status == 0
    status, out, err = _run(capsys, "generate", "--target", raw / "target", *arguments)
    assert status == 0
    assert "converting for this run only" in err
    assert json.loads(out) == json.loads(expected)
    loaded = []
    for target, drafter in ((raw / "target", raw / "drafter"), (pair, raw / "drafter"), (raw / "target", pair), (pair, pair)):
        args = cli.make_parser(cli.COMMANDS, lambda parser: None).parse_args(
            ["generate", "--target", str(target), "--drafter", str(drafter), "--prompt", "a"]
        )
        models = cli._load(args).models
        loaded.append({name: float(value.sum()) for part in models if part is not None for name, value in checkpoint.leaves(part).items()})
    assert all(found == loaded[0] for found in loaded)


def test_bench_writes_figures_and_resumes_without_running_anything_again(capsys, pair, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ("bench", "--pair", pair, "--prompts", prompts, "--max-new-tokens", 9, "--num-examples", 2, "--out", out)
    status, told, _ = _run(capsys, *arguments, "--methods", "dflash")
    assert status == 0
    figures = json.loads((out / "results.json").read_text())
    assert list(figures["methods"]) == ["autoregressive", "dflash"]
    assert {"tau", "tau_pooled", "tokens_per_second", "target_passes", "histogram", "ceiling_rate"} <= figures["methods"]["dflash"].keys()
    assert figures["identical"] is True
    assert figures["speedup"].keys() == figures["methods"].keys()
    assert {"device", "cores", "dtype", "date", "versions"} <= figures["environment"].keys()
    assert "dflash" in told
    assert "| dflash |" in (out / "tables.md").read_text()
    assert (out / "histograms.png").read_bytes()[:4] == b"\x89PNG"

    monkeypatch.setattr(compare, "run_rounds", lambda *_, **__: pytest.fail("a finished run was repeated"))
    status, _, _ = _run(capsys, *arguments, "--methods", "dflash")
    assert status == 0
    assert json.loads((out / "results.json").read_text())["methods"] == figures["methods"]
    # what an earlier command has finished stays in the tables
    status, told, _ = _run(capsys, *arguments, "--methods", "autoregressive", "--preflight")
    assert status == 0
    assert "preflight: rounds of dflash at temperature 0" in told
    assert json.loads((out / "results.json").read_text())["methods"] == figures["methods"]
    status, _, _ = _run(capsys, *arguments, "--methods", "dflash", "--traces", "dflash")
    assert status == 0
    counted = json.loads((out / "results.json").read_text())["traces"]["dflash"]
    assert counted["matched"] == {"hits": 0, "total": 0, "share": None}
    assert counted["agreement"]["total"] == sum(rate["total"] for rate in counted["agreement_by_distance"].values())
    assert "| drafts behind a rejected one that equal" in (out / "tables.md").read_text()
    status, _, err = _run(capsys, *arguments, "--methods", "dflash", "--traces", "")
    assert status == 2
    assert "unknown method ''" in err
    status, _, err = _run(capsys, *arguments, "--traces", "autoregressive")
    assert status == 2
    assert "plain decoding proposes nothing" in err
    status, _, err = _run(capsys, *arguments, "--methods", "dflash", "--temperature", 0.5)
    assert status == 2
    assert "other settings (temperature)" in err


@pytest.mark.slow
def test_a_profile_is_written_and_used(capsys, pair, tmp_path, monkeypatch):
    def measured(models, prompts, *, config, show_progress):
        """What is measured is another test's matter; costs by hand."""
        assert len(prompts) == 2
        assert not show_progress
        arms = (arm(PLAIN, 1.0), arm({**CHAIN, "num_nodes": 3}, 1.0, (2.0, 1.5)), arm({"num_blocks": 1, "num_nodes": 7}, 9.0, (2.5, 2.0)))
        return made_profile(key=profiles.profile_key(models), rows=config.rows, contexts=config.contexts, arms=(arms,))

    monkeypatch.setattr(profiles, "measure_profile", measured)
    prompts, costs = tmp_path / "prompts.jsonl", tmp_path / "profile.json"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (SENTENCE[:9], "a mat")))
    status, out, _ = _run(
        capsys, "profile", "--pair", pair, "--prompts", prompts, "--rows", "1", "--contexts", "40", "--nodes", "7", "--out", costs
    )
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["1", "arm", "plain", "chain", "tree", "written:"]
    asked = ("generate", "--pair", pair, "--prompt", SENTENCE[:9], "--max-new-tokens", 12, "--json", "-")
    status, out, _ = _run(capsys, *asked, "--profile", costs)
    assert status == 0
    expected = _run(capsys, *asked, "--method", "autoregressive")[1]
    assert json.loads(out)["results"][0]["tokens"] == json.loads(expected)["results"][0]["tokens"]
    status, _, err = _run(capsys, *asked, "--method", "scheduled")
    assert status == 2
    assert "measure them with `reanchor-jax profile`" in err
    status, _, err = _run(capsys, *asked, "--method", "dflash", "--profile", costs)
    assert status == 2
    assert "--profile belongs to the method scheduled; got the method dflash" in err
    bench = ("bench", "--pair", pair, "--prompts", prompts, "--out", tmp_path / "bench", "--max-new-tokens", 12, "--methods", "")
    assert _run(capsys, *bench, "--profile", costs)[0] == 0
    assert list(json.loads((tmp_path / "bench" / "results.json").read_text())["methods"]) == ["autoregressive", "scheduled"]
    assert "dflash" not in (tmp_path / "bench" / "tables.md").read_text()  # the column of differences too
    found = json.loads(costs.read_text())
    found["arms"][0][1]["tokens"][0] += 1
    costs.write_text(json.dumps(found))
    status, _, err = _run(capsys, *bench, "--profile", costs)
    assert status == 2
    assert "other settings (arms)" in err  # timings of two schedules are not mixed
    found["key"]["cores"] = 999
    costs.write_text(json.dumps(found))
    status, _, err = _run(capsys, *asked, "--profile", costs)
    assert status == 2
    assert "measured with cores 999" in err
    status, _, err = _run(capsys, "profile", "--pair", pair, "--prompts", prompts, "--out", prompts)
    assert status == 2
    assert "is the prompts file itself" in err


def test_demo_shows_a_story_and_a_table(capsys, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_PROMPTS", (SENTENCE[:9], "a mat"))
    monkeypatch.setattr(demo, "_NEW_TOKENS", 9)
    monkeypatch.setattr(demo, "_METHODS", ("autoregressive", "dflash"))
    monkeypatch.setattr(demo, "_STORY_METHOD", "dflash")
    status, out, _ = _run(capsys, "demo", "--pair", pair, "--json", tmp_path / "demo.json")
    assert status == 0
    assert SENTENCE[:9] in out
    assert "identical output: yes" in out
    assert "times the parameters of its target: a draft costs" in out
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["identical"] is True
    assert list(figures) == ["methods", "identical", "speedup", "environment"]


def test_every_command_multiplies_in_full_float32(capsys, pair, monkeypatch):
    """goodfire-ai/spd#970: TF32, the default of a GPU, makes differences that are none of the method's, and hides some that are"""
    seen = []
    monkeypatch.setattr(demo, "run", lambda *_, **__: seen.append(jax.config.jax_default_matmul_precision))
    with jax.default_matmul_precision("default"):
        assert cli.main(["demo", "--pair", str(pair)]) == 0
    assert seen == ["highest"]


def test_inspect_tells_what_a_directory_holds(capsys, pair):
    status, out, _ = _run(capsys, "inspect", pair)
    assert status == 0
    assert "block size" in out
    assert "memory for" not in out
    status, out, _ = _run(capsys, "inspect", pair, "--context", 200, "--batch", 3)
    assert status == 0
    assert out.index("block size") < out.index("memory for a batch of 3 and a context of 200 tokens")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((), "required: COMMAND"),
        (("brew",), "invalid choice: 'brew'"),
        (("generate", "--pair", "PAIR"), "one of the arguments --prompt --prompts is required"),
        (("generate", "--pair", "PAIR", "--target", "PAIR", "--prompt", "a"), "--target: not allowed with argument --pair"),
        (("generate", "--pair", "PAIR", "--drafter", "PAIR", "--prompt", "a"), "--drafter goes with --target"),
        (("generate", "--pair", "nowhere", "--prompt", "a"), "'nowhere' is neither a directory nor an embedded pair"),
        (("generate", "--target", "nowhere", "--prompt", "a"), "nowhere is not a directory"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--method", "eagle"), "unknown method 'eagle'"),
        (("generate", "--target", "PAIR", "--prompt", "a", "--method", "dflash"), "method dflash needs a drafter"),
        (("generate", "--pair", "PAIR", "--prompt", ""), "the prompt is empty"),
        (("generate", "--pair", "PAIR", "--prompt", "a\udcff"), "not valid UTF-8"),
        (("generate", "--target", "BARE", "--prompt", "a"), "has no tokenizer"),
        (("generate", "--pair", "PAIR", "--prompt", "a" * 200), r"exceed the 256 positions of the target"),
        (
            ("generate", "--pair", "PAIR", "--prompt", "a", "--max-new-tokens", "0"),
            "--max-new-tokens: must be a whole number of at least 1; got 0",
        ),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--max-new-tokens", "many"), "must be a whole number of at least 1; got many"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--temperature", "-1"), "temperature must be 0 or more; got -1.0"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--temperature", "nan"), "temperature must be 0 or more; got nan"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--top-p", "0"), r"top_p must lie in \(0, 1\]; got 0.0"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--seed", "-1"), "seed must lie in"),
        (
            ("generate", "--pair", "PAIR", "--prompt", "a", "--retain", "both", "--method", "dflash"),
            "--retain belongs to the method reanchor",
        ),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--chat"), "no chat template"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--json", "FILE/out.json"), "Not a directory"),
        (("generate", "--pair", "PAIR", "--prompt", "a", "--json", "OUT/x.json"), "out/x.json: No such file"),
        (("generate", "--pair", "nowhere", "--prompt", "a", "--json", "FILE" + "x" * 255), "x: File name too long"),
        (("generate", "--pair", "nowhere", "--prompts", "PROMPTS", "--json", "PROMPTS"), "is the prompts file itself; give another file"),
        (("generate", "--pair", "PAIR", "--prompts", "none.jsonl"), "none.jsonl: No such file"),
        (("generate", "--pair", "PAIR", "--prompts", "FILE"), "line 1 is not valid JSON"),
        (("bench", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "OUT", "--methods", "eagle"), "unknown method 'eagle'"),
        (("bench", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "FILE/out"), "Not a directory"),
        (("bench", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "OUT", "--num-examples", "0"), "must be a whole number"),
        (("train", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "OUT"), "give --num-steps"),
        (
            ("train", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "OUT", "--num-steps", "1"),
            "names no mask, unknown or padding token",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--num-heads=0",
            ),
            r"num_heads must be at least 1; got 0",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--head-size=-2",
            ),
            r"head_size must be at least 2; got -2",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--head-size=7",
            ),
            r"head_size must be even, .* got 7",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--mlp-width=-5",
            ),
            r"mlp_width must be at least 1; got -5",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--num-kv-heads=-4",
            ),
            r"num_kv_heads must be at least 1; got -4",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--num-kv-heads=3",
            ),
            r"num_kv_heads \(3\) must divide num_heads \(4\)",
        ),
        (
            (
                "train",
                "--pair",
                "PAIR",
                "--prompts",
                "PROMPTS",
                "--out",
                "OUT/run",
                "--num-steps=1",
                "--mask-token-id=262",
                "--num-layers=0",
            ),
            r"num_layers must be at least 1; got 0",
        ),
        (
            ("train", "--pair", "PAIR", "--prompts", "PROMPTS", "--out", "OUT/run", "--num-steps=1", "--mask-token-id=262", "--window=-1"),
            r"window must be at least 0; got -1",
        ),
        (("train", "--target", "BARE", "--prompts", "PROMPTS", "--out", "OUT", "--num-steps", "1"), "has no tokenizer"),
        (("convert", "--pair", "nowhere", "--out", "OUT"), "'nowhere' is neither"),
        (("convert", "--pair", "PAIR", "--out", "OUT", "--calibration", "none.json"), "--calibration none.json was not found"),
        (("inspect", "nowhere"), "'nowhere' is neither"),
        (("inspect", "PAIR", "--batch", "3"), r"--batch \(3\) goes with --context"),
        (("inspect", "PAIR", "--context", "257"), r"context \(257\) exceeds the 256 positions"),
        (("demo", "--pair", "BARE"), "lacks a drafter"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_leaves_nothing(capsys, pair, target_only, prompts, tmp_path, arguments, rule):
    (tmp_path / "file").write_text("not json")
    before = sorted(tmp_path.iterdir())
    names = {"PAIR": pair, "BARE": target_only, "FILE": tmp_path / "file", "PROMPTS": prompts, "OUT": tmp_path / "out"}
    given = []
    for argument in arguments:
        name, slash, rest = argument.partition("/")
        given.append(f"{names[name]}{slash}{rest}" if name in names else argument)
    status, out, err = _run(capsys, *given)
    assert status == 2
    assert out == ""
    assert err.startswith("reanchor-jax: error: ")
    assert err.count("\n") == 1
    assert re.search(rule, err), err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error(pair, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    assert cli.main(["inspect", str(pair)]) == 0
    getattr(sys, name).close()


def test_json_goes_into_a_pipe_and_through_a_link(capsys, pair, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("out.json")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    for name in ("pipe", "link"):
        assert _run(capsys, "generate", "--target", pair, "--prompt", "a", "--max-new-tokens", 2, "--json", tmp_path / name)[0] == 0
    reader.join(20)
    assert got == [(tmp_path / "out.json").read_text()]
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


def test_inspect_refuses_what_load_refuses(capsys, pair, tmp_path):
    copy = shutil.copytree(pair, tmp_path / "copy")
    config = json.loads((copy / "target_config.json").read_text())
    (copy / "target_config.json").write_text(json.dumps({**config, "intermediate_size": config["intermediate_size"] + 1}))
    status, out, err = _run(capsys, "inspect", copy)
    assert (status, out) == (2, "")
    assert "target does not fit its config" in err


def test_an_interruption_is_quiet_and_leaves_no_file(capsys, pair, prompts, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(methods, "begin", interrupt)
    status, out, err = _run(capsys, "generate", "--pair", pair, "--prompts", prompts, "--json", tmp_path / "out.json")
    assert (status, out, err) == (130, "", "\ninterrupted\n")
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: reanchor-jax {command}")


def test_end_tokens_of_the_model_stop_unless_told_otherwise(pair):
    models = checkpoint.load(pair)
    parser = cli.make_parser(cli.COMMANDS, lambda parser: None)
    arguments = ["generate", "--pair", "p", "--prompt", "a"]
    assert cli._request(parser.parse_args(arguments), models).stop_token_ids == (2,)
    assert cli._request(parser.parse_args([*arguments, "--ignore-eos"]), models).stop_token_ids == ()
    args = parser.parse_args([*arguments, "--retain", "both", "--num-nodes", "30", "--draft-sampling", "coupled", "--cache-length", "256"])
    config = method_config("reanchor", models, [[1]], request=cli._request(args, models))
    assert (config.retain, config.num_nodes, config.draft_choice, config.cache_length) == ("both", 30, "coupled", 256)


@pytest.mark.slow
def test_train_makes_a_drafter_and_resumes_its_rollouts(capsys, pair, tmp_path, monkeypatch):
    texts = tmp_path / "texts.jsonl"
    story = SENTENCE + "\n\n" + 2 * SENTENCE
    texts.write_text("\n".join(json.dumps({"prompt": f"{number} {story}"}) for number in range(3)))
    shape = "--num-layers=1 --num-heads=2 --mlp-width=10 --block-size=3 --window=5 --mask-token-id=262 --target-layer-ids=0,2"
    sampling = "--num-sequences=4 --sequence-length=40 --longest-prompt=8 --num-held-out=1 --own-prefix-rate=0.5"
    training = "--num-steps=2 --batch-size=2 --num-anchors=3 --evaluation-steps=2 --num-warmup=1"
    out = tmp_path / "run"
    arguments = ("train", "--pair", pair, "--prompts", texts, "--out", out, *f"{shape} {sampling} {training}".split())
    with jax.numpy_dtype_promotion("standard"):  # optax multiplies integers by floats
        status, told, err = _run(capsys, *arguments)
    assert status == 0, err
    assert f"written: {out / 'drafter'}, {out / 'training.png'}\n" in told
    drafter = checkpoint.load_drafter(out / "drafter")
    assert (drafter.config.block_size, drafter.config.target_layer_ids, drafter.config.layers[0].window) == (3, (0, 2), 5)
    found = checkpoint.read_contents(out / "drafter").provenance["drafter"]
    assert found["training"]["num_steps"] == 2
    assert found["evaluation"]["tau"] >= 1
    assert found["sources"] == {"target": "pair", "texts": "texts.jsonl"}
    assert str(tmp_path) not in json.dumps(found)

    monkeypatch.setattr(recipe, "mixed_rollouts", lambda *_, **__: pytest.fail("the rollouts were sampled again"))
    with jax.numpy_dtype_promotion("standard"):
        assert _run(capsys, *arguments)[0] == 0
    status, _, err = _run(capsys, *arguments, "--num-layers", 2)
    assert status == 2
    assert "other settings (drafter.layer_types, drafter.num_hidden_layers)" in err


def test_later_parts_of_a_text_begin_at_its_paragraphs():
    long = "x" * 90
    assert recipe.later_parts(f"a\n\n{long}\n\n b {long}\n\nshort") == [f"{long}\n\n b {long}\n\nshort", f"b {long}\n\nshort"]


def test_embedded_pairs_are_known_by_name():
    for name in pairs.names():
        where = pairs.find(name)
        assert checkpoint.read_contents(where.target).target_config is not None
        assert checkpoint.read_contents(where.drafter).drafter_config is not None


def test_a_request_is_checked():
    with pytest.raises(ValueError, match="batch_size must be at least 1; got 0"):
        Request(max_new_tokens=1, batch_size=0)
    with pytest.raises(ValueError, match="draft_choice must be one of"):
        Request(max_new_tokens=1, draft_choice="best")  # pyright: ignore[reportArgumentType]
