"""Names of checkpoints: what is local stays local, what is a repository is downloaded once, what fails says why."""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from reanchor_jax.checkpoint import TOKENIZER_FILES
from reanchor_jax.convert import hub


def test_a_directory_is_taken_as_it_is_even_if_it_looks_like_a_repository(tmp_path, monkeypatch):
    (tmp_path / "Qwen/Qwen3-4B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", lambda *args, **kwargs: pytest.fail("looked up"))
    assert hub.find_directory("Qwen/Qwen3-4B") == (Path("Qwen/Qwen3-4B"), "Qwen3-4B")
    for name in ("nowhere", "a/b/c", "../Qwen", "/Qwen/other", tmp_path / "missing"):  # no repository is called so
        assert hub.find_directory(name)[0] == Path(name)


def test_a_repository_is_downloaded_without_other_frameworks_weights(tmp_path, monkeypatch):
    calls = []

    def download(repository, *, revision, allow_patterns):
        calls.append((repository, revision))
        for name in ("pytorch_model.bin", "dflash.py", "tf_model.h5", "original/consolidated.00.pth"):
            assert not any(fnmatch(name, pattern) for pattern in allow_patterns)
        for name in ("model-00001-of-00003.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json"):
            assert any(fnmatch(name, pattern) for pattern in allow_patterns)
        for name in (*TOKENIZER_FILES, "mask_embedding.pt"):
            assert any(fnmatch(name, pattern) for pattern in allow_patterns)
        return str(tmp_path / "snapshots/0123abcd")

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert hub.find_directory("Qwen/Qwen3-4B") == (tmp_path / "snapshots/0123abcd", "Qwen/Qwen3-4B@0123abcd")
    assert hub.find_directory("z-lab/Qwen3-4B-DFlash-b16@v1.2")[1] == "z-lab/Qwen3-4B-DFlash-b16@0123abcd"
    assert calls == [("Qwen/Qwen3-4B", None), ("z-lab/Qwen3-4B-DFlash-b16", "v1.2")]


def test_a_failed_download_says_what_to_do(monkeypatch):
    def download(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"Qwen/Qwen3-4B is no local directory .*no route to host.* give its directory"):
        hub.find_directory("Qwen/Qwen3-4B")
