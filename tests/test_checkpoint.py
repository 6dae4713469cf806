"""The checkpoint room: what is saved is what is loaded, and damage is told, not read."""

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import random_models, tiny_configs, tiny_drafter_config, tiny_models, tiny_qwen3_config

from reanchor_jax import checkpoint, inspection, pairs

TARGET, DRAFTER = tiny_configs("qwen3")


def save(path, models=None, **kwargs):
    models = models or tiny_models(5, family="qwen3")
    given = {"target_config": TARGET, "drafter_config": DRAFTER if models.drafter else None, **kwargs}
    return checkpoint.save(path, models, **given)


def assert_equal(actual, expected, dtype=None):
    actual, expected = checkpoint.leaves(actual), checkpoint.leaves(expected)
    assert actual.keys() == expected.keys()
    for name, leaf in expected.items():
        assert actual[name].dtype == (leaf.dtype if dtype is None else dtype), name
        np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(leaf.astype(actual[name].dtype)), err_msg=name)


def snapshot(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_loaded_weights_and_configs_equal_the_saved_ones(tmp_path, dtype):
    models = tiny_models(5, family="qwen3", dtype=dtype)
    loaded = checkpoint.load(save(tmp_path / "pair", models))
    assert_equal(loaded.target, models.target)
    assert_equal(loaded.drafter, models.drafter)
    assert loaded.target.config == models.target.config
    assert loaded.drafter.config == models.drafter.config
    assert loaded.target.layers[0].mlp.gate_up.dtype == dtype


def test_loaded_models_compute_what_the_saved_ones_compute(tmp_path):
    models = tiny_models(5, family="qwen3")
    loaded = checkpoint.load(save(tmp_path / "pair", models))
    tokens, positions = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]), jnp.broadcast_to(jnp.arange(5), (2, 5))
    causal = jnp.tril(jnp.ones((1, 5, 5), bool))
    run = jax.jit(lambda target: target.logits(target(tokens, positions, causal).states))
    np.testing.assert_array_equal(run(loaded.target), run(models.target))


def test_dtype_casts_while_loading(tmp_path):
    models = tiny_models(5, family="qwen3")
    loaded = checkpoint.load(save(tmp_path / "pair", models), dtype="bfloat16")
    assert_equal(loaded.target, models.target, dtype=jnp.bfloat16)
    assert_equal(loaded.drafter, models.drafter, dtype=jnp.bfloat16)
    assert loaded.target.layers[0].mlp.gate_up.dtype == jnp.bfloat16


def test_a_target_alone_loads_without_drafter(tmp_path):
    models = tiny_models(5, family="qwen3", with_drafter=False)
    loaded = checkpoint.load(save(tmp_path / "target", models))
    assert loaded.drafter is None
    assert_equal(loaded.target, models.target)
    with pytest.raises(FileNotFoundError, match="holds no drafter"):
        checkpoint.load_drafter(tmp_path / "target")


def test_a_drafter_alone_loads_by_load_drafter_only(tmp_path):
    drafter = tiny_models(5, family="qwen3").drafter
    checkpoint.save_drafter(tmp_path / "drafter", drafter, drafter_config=DRAFTER, provenance={"drafter": {"steps": 3}})
    assert_equal(checkpoint.load_drafter(tmp_path / "drafter"), drafter)
    assert json.loads((tmp_path / "drafter/provenance.json").read_text())["drafter"] == {"steps": 3}
    with pytest.raises(FileNotFoundError, match=r"drafter without a target .* read it with load_drafter"):
        checkpoint.load(tmp_path / "drafter")


def test_a_target_loads_without_reading_its_drafter(tmp_path):
    models = tiny_models(5, family="qwen3")
    shutil.rmtree(save(tmp_path / "pair", models) / "drafter")
    assert_equal(checkpoint.load_target(tmp_path / "pair", dtype="bfloat16"), models.target, dtype=jnp.bfloat16)
    checkpoint.save_drafter(tmp_path / "drafter", models.drafter, drafter_config=DRAFTER)
    with pytest.raises(FileNotFoundError, match=r"drafter without a target .* read it with load_drafter"):
        checkpoint.load_target(tmp_path / "drafter")


def test_a_sharding_places_every_leaf(tmp_path):
    models = tiny_models(5, family="qwen3")
    save(tmp_path / "pair", models)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    repeated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    loaded = checkpoint.load(tmp_path / "pair", sharding=repeated)
    assert_equal(loaded.target, models.target)
    assert {leaf.sharding for part in loaded for leaf in checkpoint.leaves(part).values()} == {repeated}

    asked = {}

    def choose(name, leaf):
        asked[name] = leaf
        return split if name.startswith("target/") else repeated

    loaded = checkpoint.load(tmp_path / "pair", dtype="bfloat16", sharding=choose)
    assert_equal(loaded.drafter, models.drafter, dtype=jnp.bfloat16)
    assert {leaf.sharding for leaf in checkpoint.leaves(loaded.target).values()} == {split}
    assert {leaf.sharding for leaf in checkpoint.leaves(loaded.drafter).values()} == {repeated}
    assert asked.keys() == {f"{part}/{leaf}" for part in ("target", "drafter") for leaf in checkpoint.leaves(getattr(models, part))}
    assert (asked["target/layers/0/mlp/gate_up/kernel"].shape, asked["drafter/norm/scale"].dtype) == ((24, 2, 38), jnp.bfloat16)


def test_a_sharding_that_does_not_fit_is_told_with_its_leaf(tmp_path):
    save(tmp_path / "pair")
    with pytest.raises(ValueError, match=r"sharding must give a jax\.sharding\.Sharding for every leaf; got None for target/"):
        checkpoint.load(tmp_path / "pair", sharding=lambda name, leaf: None)
    mesh = jax.sharding.AbstractMesh((5,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"sharding of drafter/\S+, shape \(.*\), does not fit: .* Give one whose axes divide the shape"):
        checkpoint.load_drafter(tmp_path / "pair", sharding=split)


def test_weights_are_split_over_four_devices(tmp_path):
    models = tiny_models(5, family="qwen3")
    save(tmp_path / "pair", models)
    program = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from reanchor_jax import checkpoint
mesh = Mesh(np.array(jax.devices()), ("model",))
def choose(name, leaf):
    return NamedSharding(mesh, PartitionSpec(*(None if size % 4 else "model" for size in leaf.shape[:1])))
target = checkpoint.load_target(sys.argv[1], sharding=choose)
found = checkpoint.leaves(target)
kernel = found["layers/3/attention/output/kernel"]
assert {shard.data.shape for shard in kernel.addressable_shards} == {(21, 24)}, kernel.sharding
assert len({shard.device for shard in kernel.addressable_shards}) == 4
assert {shard.data.shape for shard in found["embedding/embedding"].addressable_shards} == {(61, 24)}
np.savez(sys.argv[2], **{name.replace("/", "."): np.asarray(leaf) for name, leaf in found.items()})
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", program, str(tmp_path / "pair"), str(tmp_path / "found.npz")]
    subprocess.run(command, check=True, env=environment, timeout=240)
    with np.load(tmp_path / "found.npz") as found:
        for name, leaf in checkpoint.leaves(models.target).items():
            np.testing.assert_array_equal(found[name.replace("/", ".")], leaf, err_msg=name)


def test_a_directory_without_provenance_loads_and_one_of_another_format_is_refused(tmp_path):
    models = tiny_models(5, family="qwen3")
    file = save(tmp_path / "pair", models) / "provenance.json"
    provenance = json.loads(file.read_text())
    assert provenance.pop("format") == checkpoint.FORMAT == 2
    file.unlink()
    assert_equal(checkpoint.load(tmp_path / "pair").target, models.target)
    file.write_text(json.dumps(provenance))  # as the first directories were written
    with pytest.raises(ValueError, match=r"pair has format 1, reanchor-jax \S+ reads format 2; convert or train it again"):
        checkpoint.load(tmp_path / "pair")
    for number, advice in ((3, "install a newer"), ("1.5", "install a newer"), (1, "convert or train it again with this one")):
        file.write_text(json.dumps({**provenance, "format": number}))
        for read in (checkpoint.load, checkpoint.load_drafter, inspection.describe):
            with pytest.raises(ValueError, match=rf"pair has format {number!r}, reanchor-jax \S+ reads format 2; {advice}"):
                read(tmp_path / "pair")


def test_generation_config_and_tokenizer_files_travel_with_the_weights(tmp_path):
    files = {"generation_config.json": b'{"eos_token_id": [7, 11]}', "tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ x }}"}
    save(tmp_path / "pair", files=files)
    assert {name: (tmp_path / "pair" / name).read_bytes() for name in files} == files
    assert checkpoint.load(tmp_path / "pair").target.config.eos_token_ids == (7, 11)


def test_loading_leaves_the_directory_as_it_was(tmp_path):
    save(tmp_path / "pair")
    before = snapshot(tmp_path)
    checkpoint.load(tmp_path / "pair")
    assert snapshot(tmp_path) == before


def test_relative_paths_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.load(save("pair")).drafter is not None
    assert sorted(os.listdir(tmp_path)) == ["pair"]


def test_a_taken_path_is_refused_and_left_as_it_was(tmp_path):
    (tmp_path / "pair").mkdir()
    (tmp_path / "pair/thesis.txt").write_text("mine")
    for overwrite, text in ((False, "is not empty"), (True, "was not written by this package")):
        with pytest.raises(FileExistsError, match=text):
            save(tmp_path / "pair", overwrite=overwrite)
    assert snapshot(tmp_path) == {(tmp_path / "pair/thesis.txt").relative_to(tmp_path): b"mine"}


def test_overwrite_replaces_a_directory_of_ours_and_an_empty_one_is_free(tmp_path):
    (tmp_path / "pair").mkdir()
    save(tmp_path / "pair", files={"tokenizer.json": b"{}"})
    other = tiny_models(6, family="qwen3")
    with pytest.raises(FileExistsError, match="is not empty"):
        save(tmp_path / "pair", other)
    save(tmp_path / "pair", other, overwrite=True)
    assert_equal(checkpoint.load(tmp_path / "pair").target, other.target)
    assert not (tmp_path / "pair/tokenizer.json").exists()
    assert os.listdir(tmp_path) == ["pair"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("thesis.txt", "it holds thesis.txt"),
        (".git/config", "it holds .git"),
        ("target/notes/a.txt", "it holds target/notes/a.txt"),
        ("README.md", "it holds README.md"),
        ("LICENSE/mine", "it holds LICENSE"),
        ("provenance.json", "its provenance.json does not say so"),
    ],
)
def test_overwrite_refuses_a_directory_with_anything_of_another_s_and_names_it(tmp_path, name, told):
    save(tmp_path / "pair", files={"tokenizer.json": b"{}"})
    assert checkpoint.foreign_entry(tmp_path / "pair") is None
    (tmp_path / "pair" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "pair" / name).write_text('{"project": "thesis"}')
    before = snapshot(tmp_path)
    with pytest.raises(FileExistsError, match=rf"pair was not written by this package \({re.escape(told)}\), so it is not overwritten"):
        save(tmp_path / "pair", overwrite=True)
    assert snapshot(tmp_path) == before


def test_overwrite_refuses_a_link_in_the_place_of_weights(tmp_path):
    save(tmp_path / "pair")
    (tmp_path / "pair/drafter").rename(tmp_path / "elsewhere")
    (tmp_path / "pair/drafter").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="it holds drafter"):
        save(tmp_path / "pair", overwrite=True)


@pytest.mark.parametrize(
    ("edited", "told"),
    [
        ({"weights": []}, "weights must hold an object"),
        ({"weights": {"target": ["a"]}}, "weights must hold an object"),
        ({"weights": {"target": {"a": 3}}}, "weights.target: a must have bytes"),
        ({"weights": {"target": {"a": {"bytes": "3", "sha256": ""}}}}, "weights.target: a must have bytes"),
        ({"weights": {"target": {"a": {"bytes": True, "sha256": ""}}}}, "weights.target: a must have bytes"),
        ({"weights": {"target": {"a": {"bytes": 3}}}}, "weights.target: a must have bytes"),
        ({"weights": {"target": {"../../a": {"bytes": 3, "sha256": ""}}}}, "weights.target: '../../a' lies outside the folder"),
        ({"weights": {"target": {"/a": {"bytes": 3, "sha256": ""}}}}, "weights.target: '/a' lies outside the folder"),
        *(({"format": number}, f"format must be a whole number of at least 1; got {number}") for number in (True, 0, -1, 1.0, None)),
    ],
)
def test_an_edited_provenance_is_named_by_load_and_inspect_alike(tmp_path, edited, told):
    file = save(tmp_path / "pair") / "provenance.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **edited}))
    for read in (checkpoint.load, checkpoint.load_drafter, inspection.describe):
        with pytest.raises(ValueError, match=rf"provenance\.json is damaged: {re.escape(told)}"):
            read(tmp_path / "pair")


def test_a_byte_order_mark_is_read_over_and_deep_nesting_is_told(tmp_path):
    config = save(tmp_path / "pair") / "target_config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert checkpoint.load(tmp_path / "pair").drafter is not None
    config.write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"target_config\.json is not valid JSON"):
        checkpoint.load(tmp_path / "pair")


@pytest.mark.parametrize("name", ["nope/../pair", "made/deep/pair"])
def test_only_the_parents_that_are_needed_are_made_and_a_failed_save_takes_them_back(tmp_path, name):
    with pytest.raises(FileNotFoundError):
        save(tmp_path / name, files={"tokenizer.json": tmp_path / "nowhere.json"})
    assert os.listdir(tmp_path) == []
    save(tmp_path / name)
    assert os.listdir(tmp_path) == [name.partition("/")[0] if ".." not in name else "pair"]


def test_a_failed_save_leaves_the_old_directory_and_nothing_else(tmp_path):
    save(tmp_path / "pair")
    before = snapshot(tmp_path)
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "pair", files={"tokenizer.json": tmp_path / "nowhere.json"}, overwrite=True)
    assert snapshot(tmp_path) == before
    assert os.listdir(tmp_path) == ["pair"]


def test_a_config_of_another_model_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"target_config does not describe the model: mlp_width differ"):
        save(tmp_path / "pair", target_config={**TARGET, "intermediate_size": 39})
    with pytest.raises(ValueError, match=r"drafter_config does not describe the model: num_slots, num_drafts differ"):
        save(tmp_path / "pair", drafter_config=tiny_drafter_config(TARGET, block_size=5))
    with pytest.raises(ValueError, match="give both or neither"):
        save(tmp_path / "pair", drafter_config=None)
    with pytest.raises(ValueError, match=r"files holds 'notes\.txt'"):
        save(tmp_path / "pair", files={"notes.txt": b""})
    assert os.listdir(tmp_path) == []


def test_paths_that_are_no_directory_of_ours_are_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        checkpoint.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds neither target_config\.json nor drafter_config\.json; give the directory"):
        checkpoint.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="looks like a Hugging Face checkpoint: convert it first"):
        checkpoint.load(tmp_path)


def test_broken_and_incomplete_configs_are_named(tmp_path):
    config = save(tmp_path / "pair") / "target_config.json"
    config.write_text(json.dumps({name: value for name, value in TARGET.items() if name != "hidden_size"}))
    with pytest.raises(ValueError, match="lacks 'hidden_size'"):
        checkpoint.load(tmp_path / "pair")
    config.write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"target_config\.json is not valid JSON"):
        checkpoint.load(tmp_path / "pair")
    config.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object; got list"):
        checkpoint.load(tmp_path / "pair")


def test_weights_that_do_not_fit_the_config_are_all_listed(tmp_path):
    save(tmp_path / "pair")
    edited = {**TARGET, "intermediate_size": 39, "num_hidden_layers": 4, "tie_word_embeddings": False}
    (tmp_path / "pair/target_config.json").write_text(json.dumps(edited))
    (tmp_path / "pair/drafter_config.json").unlink()
    for read in (checkpoint.load, inspection.describe):
        with pytest.raises(ValueError, match="does not fit its config") as caught:
            read(tmp_path / "pair")
        assert "missing head/kernel" in str(caught.value)
        assert "unexpected layers/4/attention/query_key_value/kernel" in str(caught.value)
        assert "layers/3/mlp/down/kernel has shape (38, 24), its config needs (39, 24)" in str(caught.value)


def test_a_drafter_of_another_target_is_refused(tmp_path):
    save(tmp_path / "pair")
    config = tmp_path / "pair/drafter_config.json"
    config.write_text(json.dumps({**DRAFTER, "num_target_layers": 6}))
    for read in (checkpoint.load, inspection.describe):
        with pytest.raises(ValueError, match="made for a target of 6 layers, this one has 5"):
            read(tmp_path / "pair")


@pytest.mark.parametrize("pattern", ["manifest.ocdbt", "_METADATA", "d/*", "ocdbt.process_0/d/*"])
def test_truncated_weights_are_told_by_file(tmp_path, pattern):
    save(tmp_path / "pair")
    files = list((tmp_path / "pair/target").glob(pattern))
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"target is damaged: .* bytes, not ") as caught:
        checkpoint.load(tmp_path / "pair")
    assert all(str(file.relative_to(tmp_path / "pair/target")) in str(caught.value) for file in files)


def test_a_missing_file_of_the_weights_is_told(tmp_path):
    save(tmp_path / "pair")
    next((tmp_path / "pair/drafter/ocdbt.process_0/d").iterdir()).unlink()
    with pytest.raises(ValueError, match=r"drafter is damaged: ocdbt.process_0/d/\w+ is missing"):
        checkpoint.load_drafter(tmp_path / "pair")


def test_damage_without_a_record_is_told_all_the_same(tmp_path):
    save(tmp_path / "pair")
    (tmp_path / "pair/provenance.json").unlink()
    (tmp_path / "pair/target/manifest.ocdbt").write_bytes(b"")
    # in a process of its own: Orbax leaves reads in flight when one fails, and their late ends would fall into other tests
    # on a stream of its own: those late ends write to stderr in the middle of what the main thread writes there
    read = """
import sys
from reanchor_jax import checkpoint
try:
    checkpoint.load(sys.argv[1])
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", read, str(tmp_path / "pair")], capture_output=True, text=True, check=False)
    assert "target cannot be read, a file in it is truncated" in done.stdout


def test_changed_content_is_found_when_asked(tmp_path):
    save(tmp_path / "pair")
    assert checkpoint.check_content(tmp_path / "pair") > 4
    file = max((tmp_path / "pair/target").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="has other content than when it was written"):
        checkpoint.check_content(tmp_path / "pair")


@pytest.mark.parametrize("name", pairs.names())
def test_the_embedded_pairs_are_as_they_were_written(name):
    assert checkpoint.check_content(pairs.path(name)) > 4


def test_missing_weights_are_told(tmp_path):
    save(tmp_path / "pair")
    shutil.rmtree(tmp_path / "pair/drafter")
    with pytest.raises(FileNotFoundError, match="drafter is missing although its config is there"):
        checkpoint.load(tmp_path / "pair")


def test_weights_of_mixed_dtypes_need_a_dtype(tmp_path):
    models = tiny_models(5, family="qwen3")
    values = checkpoint.leaves(models.target)
    values["norm/scale"] = values["norm/scale"].astype(jnp.bfloat16)
    save(tmp_path / "pair", models._replace(target=checkpoint.with_leaves(models.target, values)))
    with pytest.raises(ValueError, match=r"several dtypes \(bfloat16, float32\); pass dtype"):
        checkpoint.load(tmp_path / "pair")
    loaded = checkpoint.load(tmp_path / "pair", dtype=jnp.float32)
    assert {leaf.dtype for leaf in checkpoint.leaves(loaded.target).values()} == {jnp.dtype("float32")}


def test_a_dtype_that_is_no_weight_dtype_is_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of float32, bfloat16, float16; got int8"):
        checkpoint.load("anywhere", dtype="int8")


def test_describe_counts_parameters_bytes_and_cache_by_hand(tmp_path):
    target = tiny_qwen3_config(num_hidden_layers=2, tie_word_embeddings=False)
    drafter = tiny_drafter_config(target, num_hidden_layers=1, layer_types=["full_attention"], target_layer_ids=[1])
    models = random_models(target, drafter, seed=7, dtype=jnp.bfloat16)
    checkpoint.save(tmp_path / "pair", models, target_config=target, drafter_config=drafter, files={"tokenizer.json": b"{}"})
    text = inspection.describe(tmp_path / "pair")
    # embedding and head 61x24; a layer: q, o 24x84, k, v 24x42, MLP 3x24x38, norms 2x24 + 2x14; final norm 24
    num_target = 2 * 61 * 24 + 2 * (2 * 24 * 84 + 2 * 24 * 42 + 3 * 24 * 38 + 48 + 28) + 24
    # fc 24x24, its norm 24; a layer: q, o 24x32, k, v 24x16, MLP 3x24x34, norms 2x24 + 2x8; final norm 24
    num_drafter = 24 * 24 + 24 + (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 34 + 48 + 16) + 24
    rows = {line[: line.find("  ")]: line.split()[-2:] for line in text.splitlines() if "  " in line.strip()}
    assert rows["parameters"] == [f"{num_target:,}", f"{num_drafter:,}"]
    assert rows["bytes of weights"] == [f"{2 * num_target:,}", f"{2 * num_drafter:,}"]
    assert rows["cache bytes per token"] == [f"{2 * 2 * 3 * 14 * 2}", f"{2 * 2 * 8 * 2}"]
    assert rows["dtype"] == ["bfloat16", "bfloat16"]
    assert "files: tokenizer.json" in text
    assert '"version": ' in text


def test_memory_of_weights_and_caches_is_counted_by_hand(tmp_path):
    sliding = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    target = tiny_qwen3_config(num_hidden_layers=2, tie_word_embeddings=False, **sliding)
    drafter = tiny_drafter_config(target, num_hidden_layers=1, layer_types=["full_attention"], target_layer_ids=[1])
    models = random_models(target, drafter, seed=7, dtype=jnp.bfloat16)
    assert [layer.window for layer in models.target.config.layers] == [5, 5]
    checkpoint.save(tmp_path / "pair", models, target_config=target, drafter_config=drafter)
    # parameters as counted in the test before; a token keeps keys and values, 3 heads of 14 in 2 layers and 2 heads of 8 in 1 layer
    num_target = 2 * 61 * 24 + 2 * (2 * 24 * 84 + 2 * 24 * 42 + 3 * 24 * 38 + 48 + 28) + 24
    num_drafter = 24 * 24 + 24 + (2 * 24 * 32 + 2 * 24 * 16 + 3 * 24 * 34 + 48 + 16) + 24
    weights, target_cache, drafter_cache = 2 * (num_target + num_drafter), 7 * 300 * 2 * (2 * 2 * 3 * 14), 7 * 300 * 2 * (2 * 2 * 8)
    title, *lines = inspection.describe_memory(tmp_path / "pair", batch=7, context=300).splitlines()
    assert title == "memory for a batch of 7 and a context of 300 tokens, in bytes:"
    assert [line.rpartition("  ")[0].split("  ")[0] for line in lines] == ["weights", "target cache", "drafter cache", "total"]
    assert [int(re.search(r" ([\d,]+)  +[\d.]+ GiB$", line)[1].replace(",", "")) for line in lines] == [
        weights,
        target_cache,
        drafter_cache,
        weights + target_cache + drafter_cache,
    ]
    with pytest.raises(ValueError, match=r"context \(513\) exceeds the 512 positions the target was made for"):
        inspection.describe_memory(tmp_path / "pair", batch=1, context=513)


def test_leaves_and_with_leaves_are_inverse():
    target = tiny_models(5).target
    values = {name: 2 * leaf for name, leaf in checkpoint.leaves(target).items()}
    doubled = checkpoint.with_leaves(target, values)
    np.testing.assert_array_equal(doubled.layers[1].mlp.gate_up.kernel[...], 2 * target.layers[1].mlp.gate_up.kernel[...])
    assert len(values) == len(jax.tree.leaves(nnx.state(target)))


def test_load_pair_takes_a_directory_as_load_does(tmp_path):
    save(tmp_path / "pair")
    assert_equal(pairs.load_pair(tmp_path / "pair", dtype="bfloat16").target, checkpoint.load(tmp_path / "pair", dtype="bfloat16").target)


def test_an_unknown_pair_lists_the_known_ones(tmp_path):
    assert pairs.find(tmp_path) == (tmp_path, tmp_path)
    target = pairs.find("stories260k").target
    assert pairs.find("stories260k/dflash") == pairs.find("stories260k") == (target, target)
    assert pairs.find("stories260k/domino") == (target, target / "drafters" / "domino")
    assert {"stories260k", "stories260k/dflash", "stories260k/domino"} <= {*pairs.names()}
    with pytest.raises(FileNotFoundError, match=r"'no-such-pair' is neither a directory nor an embedded pair; embedded are: "):
        pairs.path("no-such-pair")
