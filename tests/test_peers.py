"""Peers are run on our weights and told in the figures of a comparison; the module itself needs no PyTorch."""

import subprocess
import sys

import numpy as np
import pytest
from tiny import random_models, tiny_drafter_config, tiny_qwen3_config

from reanchor_jax import checkpoint
from reanchor_jax.bench import peers
from reanchor_jax.bench.methods import Request

PROMPTS = [np.random.default_rng(71).integers(0, 60, length).tolist() for length in (5, 13)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    target = tiny_qwen3_config()
    drafter = tiny_drafter_config(target)
    out = tmp_path_factory.mktemp("peers") / "pair"
    return checkpoint.save(out, random_models(target, drafter, seed=73), target_config=target, drafter_config=drafter)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # dflash calls transformers by its old name
def test_peers_emit_our_tokens_and_their_figures_are_told(directory):
    pytest.importorskip("torch")
    pytest.importorskip("dflash.model")
    figures = peers.compare_peers(directory, PROMPTS, request=Request(max_new_tokens=11), methods=(), show_progress=False)
    assert list(figures["methods"]) == ["autoregressive", "transformers", "dflash-pytorch"]
    assert figures["identical"]
    assert figures["methods"]["transformers"]["target_passes"] == 20
    for name in ("transformers", "dflash-pytorch"):
        assert figures["methods"][name]["tokens"] == 20
        assert figures["methods"][name]["prefill_seconds"] > 0
    assert set(figures["ratios"]) == {"transformers"}  # our dflash was not run
    rates = [figures["methods"][name]["tokens_per_second"] for name in ("autoregressive", "transformers")]
    assert figures["ratios"]["transformers"] == pytest.approx(rates[0] / rates[1])


@pytest.mark.parametrize("wrong", [{"temperature": 0.5}, {"batch_size": 2}])
def test_a_request_the_peers_cannot_do_is_refused(directory, wrong):
    with pytest.raises(ValueError, match="one prompt at a time"):
        peers.compare_peers(directory, PROMPTS, request=Request(max_new_tokens=11, **wrong))


def test_the_module_imports_without_pytorch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; import reanchor_jax.bench.peers"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)  # away from the sources: the installed package
