"""The conversion room: every tensor lands where it belongs, every problem is told at once, and a failure leaves nothing on disk."""

import hashlib
import json
import os
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from big_checkpoint import layer_shapes, target_shapes
from safetensors import safe_open
from safetensors.numpy import save_file
from situations import small_models
from tiny import FAMILIES, tiny_configs, tiny_drafter_config, tiny_llama_config, tiny_models, tiny_qwen3_config

from reanchor_jax import checkpoint, pairs
from reanchor_jax.convert.__main__ import main
from reanchor_jax.convert.engine import ConversionError, convert, export_huggingface
from reanchor_jax.convert.plan import share_index
from reanchor_jax.convert.plan import sources as sources_of
from reanchor_jax.convert.tables import drafter_table, target_table
from reanchor_jax.text import load_tokenizer


def random_tensors(shapes, dtype, seed):
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def target_tensors(config, dtype=np.float32, prefix="model."):
    """A transformers state dict of random numbers, written from its documentation and not from our tables."""
    return random_tensors(target_shapes(config, prefix), dtype, seed=11)


def drafter_tensors(config, dtype=np.float32, prefix=""):
    width, taps = config["hidden_size"], len(config["dflash_config"]["target_layer_ids"])
    shapes = {f"{prefix}fc.weight": (width, taps * width), f"{prefix}hidden_norm.weight": (width,), f"{prefix}norm.weight": (width,)}
    return random_tensors(shapes | layer_shapes(config, prefix, has_qk_norm=True), dtype, seed=13)


def write(directory, config, tensors, num_shards=1, **others):
    """Write a Hugging Face directory, as one file or as shards with an index."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in others.items():
        (directory / name.replace("__", ".")).write_text(json.dumps(content))
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {key: f"model-{index % num_shards + 1:05}-of-{num_shards:05}.safetensors" for index, key in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({key: tensors[key] for key, home in weight_map.items() if home == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.fixture
def sources(tmp_path):
    """Directories of a Llama target and its drafter."""
    target, drafter = tiny_configs("llama")
    return (
        write(tmp_path / "llama", target, target_tensors(target)),
        write(tmp_path / "dflash", drafter, drafter_tensors(drafter)),
    )


def run(sources, out, **kwargs):
    return convert(sources[0], sources[1], out, show_progress=False, **kwargs)


def edit(directory, change):
    """Rewrite the tensors of a single-file directory by a function of their dict."""
    with safe_open(directory / "model.safetensors", framework="np") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    save_file(change(tensors), directory / "model.safetensors")


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_fails(sources, match, *, error=ConversionError, **kwargs):
    """Converting raises, says why, and leaves the disk as it was."""
    root = sources[0].parent
    before = sorted(root.rglob("*"))
    with pytest.raises(error, match=match) as caught:
        run(sources, root / "out", **kwargs)
    assert sorted(root.rglob("*")) == before
    return str(caught.value)


def assert_layers(layers, tensors, prefix, *, has_qk_norm, is_split):
    for index, layer in enumerate(layers):
        source = {key.removeprefix(f"{prefix}layers.{index}."): value for key, value in tensors.items()}
        attention, mlp = layer.attention, layer.mlp
        if is_split:
            heads, (keys, values) = attention.query.kernel[...], jnp.moveaxis(attention.key_value.kernel[...], 1, 0)
            num_shared = heads.shape[2]
        else:
            heads = attention.query_key_value.kernel[...]
            num_shared = heads.shape[2] - 2
            keys, values = heads[:, :, num_shared], heads[:, :, num_shared + 1]
        width = heads.shape[0]
        kernels = {
            "self_attn.q_proj": heads[:, :, :num_shared].reshape(width, -1),
            "self_attn.k_proj": keys.reshape(width, -1),
            "self_attn.v_proj": values.reshape(width, -1),
            "self_attn.o_proj": attention.output.kernel[...],
            "mlp.gate_proj": mlp.gate_up.kernel[:, 0],
            "mlp.up_proj": mlp.gate_up.kernel[:, 1],
            "mlp.down_proj": mlp.down.kernel[...],
        }
        scales = {"input_layernorm": layer.attention_norm, "post_attention_layernorm": layer.mlp_norm}
        if has_qk_norm:
            scales |= {"self_attn.q_norm": attention.query_norm, "self_attn.k_norm": attention.key_norm}
        for name, kernel in kernels.items():
            np.testing.assert_array_equal(kernel, source[f"{name}.weight"].T)
        for name, norm in scales.items():
            np.testing.assert_array_equal(norm.scale[...], source[f"{name}.weight"])


@pytest.mark.parametrize(
    ("family", "dtype", "num_shards", "prefix"),
    [("llama", "float32", 1, "model."), ("qwen3", "bfloat16", 3, "model."), ("llama", "float16", 2, "model."), ("qwen3", "float32", 1, "")],
)
def test_every_tensor_lands_in_its_leaf(tmp_path, family, dtype, num_shards, prefix):
    target, drafter = tiny_configs(family)
    dtype = jnp.dtype(dtype)
    target_source, drafter_source = target_tensors(target, dtype, prefix), drafter_tensors(drafter, dtype, "model." if prefix == "" else "")
    sources = (
        write(tmp_path / "target", target, target_source, num_shards),
        write(tmp_path / "drafter", drafter, drafter_source, num_shards),
    )
    models = checkpoint.load(run(sources, tmp_path / "out"))
    np.testing.assert_array_equal(models.target.embedding.embedding[...], target_source[f"{prefix}embed_tokens.weight"])
    np.testing.assert_array_equal(models.target.norm.scale[...], target_source[f"{prefix}norm.weight"])
    if family == "llama":
        np.testing.assert_array_equal(models.target.head.kernel[...], target_source["lm_head.weight"].T)
    else:
        assert models.target.head is None
    assert_layers(models.target.layers, target_source, prefix, has_qk_norm=family == "qwen3", is_split=False)
    prefix = "model." if prefix == "" else ""
    np.testing.assert_array_equal(models.drafter.fusion.kernel[...], drafter_source[f"{prefix}fc.weight"].T)
    np.testing.assert_array_equal(models.drafter.context_norm.scale[...], drafter_source[f"{prefix}hidden_norm.weight"])
    np.testing.assert_array_equal(models.drafter.norm.scale[...], drafter_source[f"{prefix}norm.weight"])
    assert_layers(models.drafter.layers, drafter_source, prefix, has_qk_norm=True, is_split=True)
    for model in (models.target, models.drafter):
        assert {leaf.dtype for leaf in checkpoint.leaves(model).values()} == {dtype}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4", *FAMILIES])
def test_every_entry_of_every_leaf_is_filled_once(family):
    models = small_models(3, family=family)
    for module, table in ((models.target, target_table(models.target.config)), (models.drafter, drafter_table(models.drafter.config))):
        filled = {leaf: np.zeros(value.shape, int) for leaf, value in checkpoint.leaves(module).items()}
        keys = []
        for leaf, count in filled.items():
            for key, rule in sources_of(leaf, table):
                keys.append(key)
                count[share_index(rule.share)] += 1
        assert all((count == 1).all() for count in filled.values())
        assert len(set(keys)) == len(keys)


def test_dtype_casts_every_tensor(sources, tmp_path):
    models = checkpoint.load(run(sources, tmp_path / "out", dtype="bfloat16"))
    expected = target_tensors(tiny_llama_config())["model.embed_tokens.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(models.target.embedding.embedding[...], expected)
    assert {leaf.dtype for leaf in checkpoint.leaves(models.drafter).values()} == {jnp.dtype("bfloat16")}


def test_the_directory_is_self_contained(tmp_path):
    target, drafter = tiny_configs("qwen3")
    others = {"tokenizer__json": {"a": 1}, "tokenizer_config__json": {}, "generation_config__json": {"eos_token_id": 5}, "notes__json": {}}
    sources = (
        write(tmp_path / "qwen", target, target_tensors(target), **others),
        write(tmp_path / "dflash", drafter, drafter_tensors(drafter), tokenizer__json={"b": 2}),
    )
    out = run(sources, tmp_path / "out")
    assert sorted(os.listdir(out)) == [
        "drafter",
        "drafter_config.json",
        "generation_config.json",
        "provenance.json",
        "target",
        "target_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((out / "tokenizer.json").read_text()) == {"a": 1}
    assert json.loads((out / "target_config.json").read_text()) == target
    written = json.loads((out / "drafter_config.json").read_text())
    assert written.pop("reanchor_jax")["fusion"] == "concatenated"
    assert written == drafter
    assert checkpoint.load(out).target.config.eos_token_ids == (5,)
    provenance = json.loads((out / "provenance.json").read_text())
    checksum = hashlib.sha256((sources[0] / "model.safetensors").read_bytes()).hexdigest()
    assert provenance["target"] == {"source": "qwen", "files": {"model.safetensors": checksum}}
    assert provenance["drafter"]["source"] == "dflash"
    assert provenance["dtype"] == {"target": "float32", "drafter": "float32"}


def test_a_target_converts_without_drafter(sources, tmp_path):
    out = convert(sources[0], None, tmp_path / "out", show_progress=False)
    assert checkpoint.load(out).drafter is None


def test_a_pair_takes_a_new_drafter_and_keeps_its_target(sources, tmp_path):
    pair = run(sources, tmp_path / "pair")
    drafter = tiny_models(17).drafter
    checkpoint.save_drafter(tmp_path / "trained", drafter, drafter_config=tiny_drafter_config(), provenance={"drafter": {"steps": 5}})
    out = convert(None, tmp_path / "trained", tmp_path / "out", pair=pair, show_progress=False)
    models, old = checkpoint.load(out), checkpoint.load(pair)
    for actual, expected in ((models.target, old.target), (models.drafter, drafter)):
        for name, leaf in checkpoint.leaves(expected).items():
            np.testing.assert_array_equal(checkpoint.leaves(actual)[name], leaf, err_msg=name)
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["target"] == json.loads((pair / "provenance.json").read_text())["target"]
    assert provenance["drafter"] == {"steps": 5}


def test_a_pair_is_recast_in_place_with_overwrite(sources, tmp_path):
    pair = run(sources, tmp_path / "pair")
    convert(None, None, pair, pair=pair, dtype="bfloat16", overwrite=True, show_progress=False)
    models = checkpoint.load(pair)
    assert models.drafter.norm.scale.dtype == models.target.norm.scale.dtype == jnp.bfloat16
    assert sorted(os.listdir(tmp_path)) == ["dflash", "llama", "pair"]


def test_a_zlab_drafter_joins_a_pair(sources, tmp_path):
    target_only = convert(sources[0], None, tmp_path / "pair", show_progress=False)
    models = checkpoint.load(convert(None, sources[1], tmp_path / "out", pair=target_only, show_progress=False))
    np.testing.assert_array_equal(models.drafter.fusion.kernel[...], drafter_tensors(tiny_drafter_config())["fc.weight"].T)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_export_is_the_inverse_of_convert_tensor_for_tensor(tmp_path, family):
    target, drafter = tiny_configs(family)
    tensors = {"target": target_tensors(target, jnp.bfloat16), "drafter": drafter_tensors(drafter, jnp.bfloat16)}
    generation = {"eos_token_id": [3]}
    sources = (
        write(tmp_path / "a", target, tensors["target"], generation_config__json=generation, tokenizer__json={"a": 1}),
        write(tmp_path / "b", drafter, tensors["drafter"]),
    )
    exported = export_huggingface(run(sources, tmp_path / "pair"), tmp_path / "exported")
    for name, expected in tensors.items():
        with safe_open(exported / name / "model.safetensors", framework="np") as file:
            actual = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert actual[key].dtype == value.dtype
            np.testing.assert_array_equal(actual[key], value, err_msg=key)
    assert json.loads((exported / "target/config.json").read_text()) == {**target, "dtype": "bfloat16"}
    assert json.loads((exported / "drafter/config.json").read_text()) == {**drafter, "dtype": "bfloat16"}
    assert json.loads((exported / "target/generation_config.json").read_text()) == generation
    assert json.loads((exported / "target/tokenizer.json").read_text()) == {"a": 1}
    for name in ("target", "drafter"):
        alone = export_huggingface(tmp_path / "pair", tmp_path / name, parts=[name])
        assert [path.name for path in alone.iterdir()] == [name]
        assert (alone / name / "model.safetensors").read_bytes() == (exported / name / "model.safetensors").read_bytes()


def test_a_duplicate_head_of_a_tied_target_is_dropped_if_equal_and_told_if_not(tmp_path):
    config = tiny_qwen3_config()
    tensors = target_tensors(config)
    drafter = tiny_drafter_config(config)
    sources = (
        write(tmp_path / "qwen", config, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, num_shards=2),
        write(tmp_path / "dflash", drafter, drafter_tensors(drafter)),
    )
    assert checkpoint.load(run(sources, tmp_path / "equal")).target.head is None
    write(sources[0], config, {**tensors, "lm_head.weight": 1 + tensors["model.embed_tokens.weight"]}, num_shards=2)
    assert_fails(sources, r"lm_head\.weight differs from the embedding although tie_word_embeddings is true; set it to false")
    write(sources[0], config, {**tensors, "lm_head.weight": np.ones((60, 24), np.float32)}, num_shards=2)
    assert_fails(sources, r"shape: lm_head\.weight is \[60, 24\], config\.json asks for \[61, 24\]")


def test_rotary_buffers_of_old_checkpoints_are_ignored(sources, tmp_path):
    edit(sources[0], lambda tensors: {**tensors, "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)})
    assert run(sources, tmp_path / "out")


def test_an_untied_target_without_head_is_an_error_with_a_hint(sources):
    edit(sources[0], lambda tensors: {key: value for key, value in tensors.items() if key != "lm_head.weight"})
    assert_fails(sources, r"missing: lm_head\.weight for head/kernel \(config\.json says tie_word_embeddings is false; set it to true")


def test_all_problems_of_both_models_come_in_one_error(sources):
    def spoil_target(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.3.input_layernorm.weight"] = np.ones(24, np.float32)
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(10, np.float32)
        tensors["norm.weight"] = tensors["model.norm.weight"]
        tensors["model.layers.2.self_attn.q_proj.weight"] = tensors["model.layers.2.self_attn.q_proj.weight"].T.copy()
        return tensors

    edit(sources[0], spoil_target)
    edit(sources[1], lambda tensors: {**tensors, "fc.weight": np.ones((24, 47), np.float32), "norm.weight": np.ones(24, np.int8)})
    text = assert_fails(sources, "7 problems, nothing was written")
    assert "target: missing: model.layers.1.mlp.up_proj.weight for layers/1/mlp/gate_up/kernel" in text
    assert "target: unexpected: model.layers.3.input_layernorm.weight [24] has no place" in text
    assert "target: unexpected: model.layers.0.self_attn.q_norm.weight [10] has no place" in text
    assert "target: duplicate: norm.weight and model.norm.weight are the same tensor" in text
    assert "target: shape: model.layers.2.self_attn.q_proj.weight is [24, 60], config.json asks for [60, 24]" in text
    assert "drafter: shape: fc.weight is [24, 47], config.json asks for [24, 48]" in text
    assert "drafter: dtype: norm.weight is I8; only F32, BF16, F16 are converted" in text


def test_a_key_in_two_shards_is_a_duplicate(tmp_path, sources):
    tensors = target_tensors(tiny_llama_config())
    target = write(tmp_path / "sharded", tiny_llama_config(), tensors, num_shards=2)
    shard = target / "model-00001-of-00002.safetensors"
    with safe_open(shard, framework="np") as file:
        keys = set(file.keys())
    save_file({key: value for key, value in tensors.items() if key in keys or key == "model.norm.weight"}, shard)
    assert_fails((target, sources[1]), r"1 problem, .*\n  target: duplicate: model\.norm\.weight is in model-00001.* and in model-00002")


@pytest.mark.parametrize("kept", [0, 5, 200, 6000, -1])
def test_a_truncated_file_is_told_without_blaming_its_tensors(sources, kept):
    file = sources[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    text = assert_fails(sources, r"file: model\.safetensors is truncated or corrupt")
    assert "missing" not in text


def test_incomplete_shards_are_told(tmp_path, sources):
    target = write(tmp_path / "sharded", tiny_llama_config(), target_tensors(tiny_llama_config()), num_shards=3)
    (target / "model-00002-of-00003.safetensors").unlink()
    text = assert_fails((target, sources[1]), r"file: model-00002-of-00003\.safetensors is listed in .* but missing; download it")
    assert "missing:" not in text
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../llama/model.safetensors"}}))
    assert_fails((target, sources[1]), "is not a file name")
    index.write_text("{}")
    assert_fails((target, sources[1]), "has no weight_map")
    index.write_text("{")
    assert_fails((target, sources[1]), "is not valid JSON")
    index.unlink()
    (target / "pytorch_model.bin").write_bytes(b"")
    assert_fails((target, sources[1]), r"neither model\.safetensors nor .* \(only safetensors is read")


def test_wrong_pairs_are_refused_before_any_weight_is_read(sources):
    for directory in sources:
        (directory / "model.safetensors").write_bytes(b"no weights here")
    nested = tiny_drafter_config()["dflash_config"]
    for changes, match in (
        ({"dflash_config": {**nested, "mask_token_id": 61}}, r"mask_token_id \(61\) must lie in 0\.\.60"),
        ({"dflash_config": {**nested, "target_layer_ids": [1, 3]}}, r"target_layer_ids holds 3, outside 0\.\.2"),
        ({"hidden_size": 26}, r"drafter width \(26\) differs from the target's \(24\)"),
        ({"vocab_size": 67}, r"drafter vocab_size \(67\) differs from the target's \(61\)"),
        ({"num_target_layers": 5}, r"made for a target of 5 layers, this one has 3"),
        ({"architectures": ["DFlash2DraftModel"]}, "this is DFlash 2"),
        ({"model_type": "gpt2"}, None),
    ):
        edit_config(sources[1], **{**tiny_drafter_config(), **changes})
        if match is None:
            assert_fails(sources, "is truncated or corrupt")
        else:
            assert_fails(sources, match, error=ValueError)
    edit_config(sources[0], model_type="gpt2")
    assert_fails(sources, "model_type 'gpt2' is not a supported target", error=ValueError)
    edit_config(sources[0], model_type="llama", rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0})
    assert_fails(sources, "the target config of .* lacks 'low_freq_factor'", error=ValueError)


def test_weights_of_several_dtypes_need_a_choice(sources, tmp_path):
    edit(sources[1], lambda tensors: {key: value.astype(jnp.bfloat16) for key, value in tensors.items()})
    assert_fails(sources, r"the weights are of several dtypes \(bfloat16, float32\); pass dtype")
    models = checkpoint.load(run(sources, tmp_path / "out", dtype="float32"))
    assert models.drafter.norm.scale.dtype == jnp.float32


def test_float16_overflow_is_an_error_not_an_infinity(sources):
    edit(sources[0], lambda tensors: {**tensors, "model.norm.weight": np.full(24, 7e4, np.float32)})
    assert_fails(sources, r"model\.norm\.weight holds values beyond float16's range; choose bfloat16", dtype="float16")


def test_wrong_paths_are_explained(sources, tmp_path):
    target, drafter = sources
    (tmp_path / "empty").mkdir()
    assert_fails((tmp_path / "nowhere", drafter), "target directory .*nowhere does not exist", error=FileNotFoundError)
    assert_fails((tmp_path / "empty", drafter), r"target directory .* has no config\.json", error=FileNotFoundError)
    assert_fails((target, tmp_path / "empty"), r"drafter directory .* has no config\.json", error=FileNotFoundError)
    with pytest.raises(ValueError, match="give either a target directory or a pair; got neither"):
        run((None, drafter), tmp_path / "out")
    with pytest.raises(ValueError, match="give either a target directory or a pair; got both"):
        run(sources, tmp_path / "out", pair=target)
    with pytest.raises(FileNotFoundError, match="neither a directory nor an embedded pair"):
        run((None, drafter), tmp_path / "out", pair="no-such-pair")
    pair = convert(target, None, tmp_path / "pair", show_progress=False)
    with pytest.raises(FileNotFoundError, match="It is a directory of ours: pass it as pair"):
        run((pair, drafter), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="holds no drafter"):
        run((None, pair), tmp_path / "out", pair=pair)
    with pytest.raises(FileExistsError, match="is not empty"):
        run(sources, pair)
    with pytest.raises(FileExistsError, match="was not written by this package"):
        run(sources, target, overwrite=True)


def test_a_dry_run_prints_the_mapping_and_writes_nothing(sources, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    assert run(sources, tmp_path / "out", dry_run=True, dtype="bfloat16") is None
    assert sorted(tmp_path.rglob("*")) == before
    lines = capsys.readouterr().out.splitlines()
    assert "  model.layers.2.mlp.down_proj.weight [24, 44] float32 -> layers/2/mlp/down/kernel [44, 24] bfloat16" in lines
    assert "  fc.weight [24, 48] float32 -> fusion/kernel [48, 24] bfloat16" in lines
    assert len(lines) == 2 + len(target_tensors(tiny_llama_config())) + len(drafter_tensors(tiny_drafter_config()))
    edit(sources[0], lambda tensors: {**tensors, "extra": np.ones(2, np.float32)})
    assert_fails(sources, "unexpected: extra", dry_run=True)


def test_progress_ends_exactly_at_its_total(sources, tmp_path, capsys):
    convert(sources[0], sources[1], tmp_path / "out")
    assert "100%" in capsys.readouterr().err.split("\r")[-1]


def test_the_command_line_converts_and_tells_errors_without_a_traceback(sources, tmp_path, capsys):
    arguments = ["--target", str(sources[0]), "--drafter", str(sources[1]), "--out", str(tmp_path / "out"), "--dtype", "bfloat16"]
    main([*arguments, "--dry-run"])
    assert "nothing was written" in capsys.readouterr().out
    main(arguments)
    assert f"written: {tmp_path / 'out'}" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "out").target.norm.scale.dtype == jnp.bfloat16
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert re.fullmatch(r"python -m reanchor_jax\.convert: error: .* is not empty; .*\n", capsys.readouterr().err.split("\r")[-1])
    main(["--pair", str(tmp_path / "out"), "--out", str(tmp_path / "out"), "--dtype", "float32", "--overwrite"])
    assert checkpoint.load(tmp_path / "out").target.norm.scale.dtype == jnp.float32


def test_embedded_pairs_are_small_and_load():
    for name in pairs.names():
        assert pairs.load_pair(name).drafter is not None
    root = Path(pairs.__file__).parent
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) <= 12 << 20


def test_a_drafter_of_an_embedded_pair_is_joined_with_its_target(tmp_path):
    main(["--pair", "stories260k/domino", "--out", str(tmp_path / "out")])
    joined, named = checkpoint.load(tmp_path / "out"), pairs.load_pair("stories260k/domino")
    assert joined.drafter is not None
    assert joined.drafter.config.head is not None
    for model, expected in zip(joined, named, strict=True):
        for name, leaf in checkpoint.leaves(expected).items():
            np.testing.assert_array_equal(checkpoint.leaves(model)[name], leaf, err_msg=name)
    assert load_tokenizer(tmp_path / "out") is not None
