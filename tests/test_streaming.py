"""Conversion at size: weights pass through in pieces, memory does not grow with the model, and a killed run can be run again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from big_checkpoint import CONVERT, QWEN3_4B, assert_equals_source, measure, write_checkpoint
from tiny import tiny_llama_config, tiny_qwen3_config

from reanchor_jax import checkpoint, weights
from reanchor_jax.convert import engine
from reanchor_jax.files import clear_leftovers, fresh_directory, settle

TINY = tiny_qwen3_config(dtype="bfloat16")


@pytest.fixture
def source(tmp_path):
    """A tiny tied Qwen3 checkpoint in shards of a few hundred bytes to a few thousand."""
    write_checkpoint(tmp_path / "source", TINY, (3000, 500, 9000))
    return tmp_path / "source"


def convert(source, out, **kwargs):
    return engine.convert(source, None, out, show_progress=False, **kwargs)


def small_pieces(monkeypatch):
    """Make a piece so small that most leaves take several, and a group several leaves."""
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 700)
    monkeypatch.setattr(weights, "_GROUP_BYTES", 2600)
    monkeypatch.setattr(engine, "_BLOCK_BYTES", 500)


def test_weights_written_in_pieces_equal_their_tensors_whatever_the_size_of_a_piece(source, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    longest = 0

    def read(move, dtype, progress, rows=engine._rows):
        whole = rows(move, dtype, progress)

        def read_piece(start, stop):
            nonlocal longest
            block = whole.read(start, stop)
            longest = max(longest, block.nbytes)
            return block

        return weights.Rows(shape=whole.shape, dtype=whole.dtype, read=read_piece)

    monkeypatch.setattr(engine, "_rows", read)
    out = convert(source, tmp_path / "out")
    assert longest <= 700
    assert assert_equals_source(out, source) == 2 + 8 * 5
    wide = checkpoint.leaves(checkpoint.load_target(convert(source, tmp_path / "wide", dtype="float32")))
    for name, leaf in checkpoint.leaves(checkpoint.load_target(out)).items():
        np.testing.assert_array_equal(wide[name], leaf.astype(jnp.float32), err_msg=name)


def test_checks_of_values_see_every_piece(tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    config = tiny_llama_config(dtype="float32")
    write_checkpoint(tmp_path / "source", config, (10**6,))
    tied = {**config, "tie_word_embeddings": True}
    (tmp_path / "source/config.json").write_text(json.dumps(tied))
    with pytest.raises(engine.ConversionError, match=r"1 problem, .*\n  target: repeat: lm_head\.weight differs from the embedding"):
        convert(tmp_path / "source", tmp_path / "out")
    file = next((tmp_path / "source").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-4:] = np.float32(7e4).tobytes()  # the last number of the last tensor: model.norm.weight
    file.write_bytes(content)
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    with pytest.raises(engine.ConversionError, match=r"1 problem, .*\n  target: dtype: model\.norm\.weight holds values beyond float16"):
        convert(tmp_path / "source", tmp_path / "out", dtype="float16")
    assert sorted(os.listdir(tmp_path)) == ["source"]


def test_orbax_alone_reads_what_was_written_in_pieces(source, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    out = convert(source, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(out / "target")
    target = checkpoint.load_target(out)
    np.testing.assert_array_equal(found["embedding"]["embedding"], target.embedding.embedding[...])
    np.testing.assert_array_equal(found["layers"]["4"]["mlp"]["down"]["kernel"], target.layers[4].mlp.down.kernel[...])
    assert found["norm"]["scale"].dtype == ml_dtypes.bfloat16


def test_a_leaf_that_cannot_be_read_leaves_nothing(source, tmp_path, monkeypatch):
    small_pieces(monkeypatch)
    reads = iter(range(30))

    def fail(move, dtype, progress, rows=engine._rows):
        whole = rows(move, dtype, progress)
        return weights.Rows(shape=whole.shape, dtype=whole.dtype, read=lambda start, stop: (next(reads), whole.read(start, stop))[1])

    monkeypatch.setattr(engine, "_rows", fail)
    with pytest.raises(Exception, match="StopIteration"):
        convert(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["source"]


_KILLED = """
import os, signal, sys
from reanchor_jax import checkpoint, weights
from reanchor_jax.convert import engine

moment, source, out = sys.argv[1:]
weights._CHUNK_BYTES, weights._GROUP_BYTES = 700, 2600

def die_if(module, name, is_due):
    original, calls = getattr(module, name), []
    def watched(*args, **kwargs):
        calls.append(args)
        if is_due(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, watched)

if moment == "writing":
    die_if(engine, "safe_open", lambda calls: len(calls) == 90)
elif moment == "recording":
    die_if(checkpoint, "record_files", lambda calls: True)
elif moment == "replacing":
    die_if(os, "rename", lambda calls: str(calls[-1][1]) == out)
engine.convert(source, None, out, dtype="float32", overwrite=True, show_progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "recording", "replacing"])
def test_a_killed_run_is_undone_by_the_same_command(source, tmp_path, moment):
    out = convert(source, tmp_path / "out")
    ended = subprocess.run([sys.executable, "-c", _KILLED, moment, str(source), str(out)], timeout=240)
    assert ended.returncode == -signal.SIGKILL
    left = sorted(path.name.rpartition("-")[0] or path.name for path in tmp_path.iterdir())
    partial = next(tmp_path.glob(".out.partial-*"))
    written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
    if moment == "replacing":
        assert left == [".out.lock", ".out.partial", ".out.replaced", "source"]
        clear_leftovers(out)
    else:
        assert left == [".out.lock", ".out.partial", "out", "source"]
        assert written > 2600  # at least one group
    assert assert_equals_source(out, source) == 2 + 8 * 5  # what stood there is whole

    convert(source, out, dtype="float32", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]
    expected = checkpoint.leaves(checkpoint.load_target(convert(source, tmp_path / "undisturbed", dtype="float32")))
    found = checkpoint.leaves(checkpoint.load_target(out))
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf, err_msg=name)


def test_what_dead_runs_left_is_removed_and_a_live_run_is_not_disturbed(source, tmp_path):
    out = tmp_path / "out"
    dead = [tmp_path / f".out.{name}" for name in ("partial-0123abcd", "replaced-4567cdef")]
    others = [tmp_path / name for name in (".out.partial-notes", ".out2.partial-0123abcd", "out.partial-0123abcd")]
    for path in (*dead, *others):
        path.mkdir()
    with fresh_directory(out) as fresh:
        # the directory that was being replaced is put back if nothing stands in its place; it was empty, so it may be written
        assert not any(path.exists() for path in dead)
        (fresh / "weights").write_text("halfway")
        for again in (clear_leftovers, lambda path: convert(source, path)):
            with pytest.raises(BlockingIOError, match=r"out is being written by another process; wait for its end"):
                again(out)
        convert(source, tmp_path / "out2")  # another name is another matter
        assert (fresh / "weights").read_text() == "halfway"
    assert (out / "weights").read_text() == "halfway"
    names = {".out.partial-notes", "out.partial-0123abcd", "out", "out2", "source"}
    assert set(os.listdir(tmp_path)) == names


@pytest.mark.parametrize("kind", ["file", "link", "folder", "pipe"])
def test_what_stands_at_the_place_of_a_lock_is_neither_written_nor_removed(tmp_path, kind):
    lock, other = tmp_path / ".out.lock", tmp_path / "thesis.txt"
    other.write_text("mine")
    make = {"file": lambda: lock.write_text("mine"), "link": lambda: lock.symlink_to(other), "folder": lock.mkdir}
    make.get(kind, lambda: os.mkfifo(lock))()
    with (
        pytest.raises(FileExistsError, match=r"\.out\.lock is not a lock left by this package; remove it yourself"),
        fresh_directory(tmp_path / "out"),
    ):
        pytest.fail("it was written")
    assert lock.is_symlink() or lock.exists()
    assert kind != "file" or lock.read_text() == "mine"
    assert other.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == [".out.lock", "thesis.txt"]


def test_a_path_is_settled_before_its_parents_are_made(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert settle(Path("a/b")) == Path("a/b")
    assert settle(tmp_path / "nope/../out") == tmp_path.resolve() / "out"
    assert settle(tmp_path / "nope/../link") == tmp_path.resolve() / "link"
    assert settle(tmp_path / "folder/..") == tmp_path.resolve()


def test_only_directories_are_taken_for_leftovers(tmp_path):
    (tmp_path / ".out.replaced-0123abcd").write_text("mine")
    (tmp_path / ".out.partial-0123abcd").symlink_to(tmp_path)
    clear_leftovers(tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == [".out.partial-0123abcd", ".out.replaced-0123abcd"]
    (tmp_path / ".out.lock").touch()  # a killed process left it
    with fresh_directory(tmp_path / "out"):
        pass
    assert sorted(os.listdir(tmp_path)) == [".out.partial-0123abcd", ".out.replaced-0123abcd", "out"]


def test_a_dry_run_leaves_even_leftovers_alone(source, tmp_path, capsys):
    (tmp_path / ".out.partial-0123abcd").mkdir()
    assert convert(source, tmp_path / "out", dry_run=True) is None
    assert sorted(os.listdir(tmp_path)) == [".out.partial-0123abcd", "source"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    # pieces of an eighth of their size, so that a checkpoint of half a gigabyte is as large beside them as one of 4 GB
    program = CONVERT.replace(
        'print("ready"', 'from reanchor_jax import weights\nweights._CHUNK_BYTES, weights._GROUP_BYTES = 1 << 23, 1 << 24\nprint("ready"'
    )
    shape = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "vocab_size": 30011,
        "eos_token_id": 30009,
        "num_hidden_layers": 14,
    }
    config = QWEN3_4B | shape
    total = write_checkpoint(tmp_path / "source", config, (200 << 20, 5 << 20, 60 << 20))
    largest = 2 * 30011 * 1024
    bound = largest + (128 << 20)
    assert total > 2 * bound
    cost = measure(program, tmp_path / "source", tmp_path / "out")
    assert cost.status == 0
    assert cost.anonymous < bound
    assert assert_equals_source(tmp_path / "out", tmp_path / "source") == 2 + 11 * 14
