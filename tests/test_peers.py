"""Peers are run on our weights and told beside our figures; without them no PyTorch is needed."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tiny import random_models, tiny_drafter_config, tiny_qwen3_config

from reanchor_jax import checkpoint, huggingface
from reanchor_jax.bench import peers
from reanchor_jax.bench.methods import Request
from reanchor_jax.cli import main

PROMPTS = [np.random.default_rng(71).integers(0, 60, length).tolist() for length in (5, 13)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tiny_qwen3_config()
    drafter = tiny_drafter_config(target)
    out = tmp_path_factory.mktemp("peers") / "pair"
    return checkpoint.save(out, random_models(target, drafter, seed=73), target_config=target, drafter_config=drafter)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # dflash calls transformers by its old name
def test_bench_tells_peers_of_the_same_weights_apart_from_methods_and_keeps_them_when_resumed(directory, tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("dflash.model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))
    command = ["bench", "--pair", str(directory), "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "11", "--ignore-eos"]
    assert main([*command, "--methods", "autoregressive", "--peers", "huggingface,dflash"]) == 0
    told = capsys.readouterr().out
    figures = json.loads((out / "results.json").read_text())
    assert list(figures["methods"]) == ["autoregressive"]
    assert list(figures["peers"]) == ["huggingface", "dflash"]
    assert figures["peers"]["huggingface"]["target_passes"] == 20
    assert {"torch", "transformers", "dflash"} <= figures["environment"]["versions"].keys()
    for found in figures["peers"].values():
        assert found["identical"]
        assert found["prefill_seconds"] > 0
    rate = figures["methods"]["autoregressive"]["tokens_per_second"]
    ratio = rate / figures["peers"]["huggingface"]["tokens_per_second"]
    assert figures["peers"]["huggingface"]["ratio"] == pytest.approx(ratio)
    assert figures["peers"]["dflash"]["ratio"] is None  # our dflash was not run
    assert f"our autoregressive makes {ratio:.2f} times that; the same tokens" in told
    assert f"makes {ratio:.2f} times" in (out / "tables.md").read_text()
    # what was measured is not measured again, and stays among the figures
    num_runs = len((out / "runs.jsonl").read_text().splitlines())
    assert main([*command, "--methods", "autoregressive,dflash"]) == 0
    assert len((out / "runs.jsonl").read_text().splitlines()) == num_runs + len(PROMPTS)
    again = json.loads((out / "results.json").read_text())
    assert again["peers"]["huggingface"] == figures["peers"]["huggingface"]
    assert again["peers"]["dflash"]["ratio"] > 0
    assert again["environment"]["versions"] == figures["environment"]["versions"]
    # runs of two versions are not mixed
    (out / "peers.json").write_text(json.dumps({**json.loads((out / "peers.json").read_text()), "torch": "0.4"}))
    assert main([*command, "--methods", "autoregressive", "--peers", "huggingface"]) == 2
    assert "other settings (torch)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "changes", "message"),
    [
        (["vllm"], {}, "peers are huggingface, dflash; got vllm"),
        (["dflash"], {"temperature": 0.5}, "one prompt at a time; got temperature 0.5"),
        (["huggingface"], {"batch_size": 2}, "one prompt at a time; got .* batch_size 2"),
    ],
)
def test_what_the_peers_cannot_do_is_refused(directory, names, changes, message):
    with pytest.raises(ValueError, match=message):
        peers.load_peers(names, directory, PROMPTS, request=Request(max_new_tokens=11, **changes))


@pytest.mark.parametrize(("changes", "told"), [({"fusion": "per_layer"}, "a mixture of taps"), ({}, "needs a drafter")])
def test_a_drafter_that_the_loop_would_run_in_part_is_refused(tmp_path, monkeypatch, changes, told):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)  # as if all were installed
    target = tiny_qwen3_config()
    drafter = tiny_drafter_config(target)
    if changes:
        drafter[huggingface.OPTIONS] = {**huggingface.read_options(drafter), **changes}
    models = random_models(target, drafter if changes else None, seed=3)
    out = checkpoint.save(tmp_path / "pair", models, target_config=target, drafter_config=drafter if changes else None)
    with pytest.raises(ValueError, match=told):
        peers.load_peers(["dflash"], out, PROMPTS, request=Request(max_new_tokens=11))


def test_packages_that_are_missing_are_named(directory, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"peers need torch \(pip install torch\), dflash \(pip install --no-deps dflash==0\.1\.0\)"):
        peers.load_peers(["huggingface", "dflash"], directory, PROMPTS, request=Request(max_new_tokens=11))


def test_peers_get_the_stored_weights_of_a_pair(directory, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"ids": PROMPTS[0]}) + "\n")
    command = ["bench", "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--methods", "autoregressive", "--peers", "huggingface"]
    for models in (["--pair", str(directory), "--dtype", "bfloat16"], ["--target", str(directory)]):
        assert main([*command, *models]) == 2
        assert "--peers goes with --pair, and without --dtype" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_module_imports_without_pytorch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; import reanchor_jax.bench.peers, reanchor_jax.cli"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)  # away from the sources: the installed package
