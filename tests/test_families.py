"""Families told by their tensors first and their config second, and what happens when the two disagree."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from situations import small_models
from tiny import FAMILIES, UNPUBLISHED, random_models, tiny_family_config, tiny_llama_config

from reanchor_jax import checkpoint, huggingface, inspection
from reanchor_jax.convert.__main__ import main
from reanchor_jax.convert.engine import ConversionError, convert, export_huggingface, export_tensors
from reanchor_jax.convert.families import find_options
from reanchor_jax.convert.tables import drafter_table

TARGET = tiny_llama_config()


def published(family, **overrides):
    """Config and tensor shapes of a tiny drafter, as its packager writes them."""
    config = tiny_family_config(family, TARGET, **overrides)
    drafter = random_models(TARGET, config, seed=3).drafter
    shapes = {key: tensor.shape for key, tensor in export_tensors(drafter, drafter_table(drafter.config)).items()}
    return {name: value for name, value in config.items() if name != huggingface.OPTIONS}, shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_and_config_agree_on_every_family(family):
    config, shapes = published(family)
    options = find_options(config, shapes)
    read = huggingface.read_drafter({**config, huggingface.OPTIONS: options})
    assert read == random_models(TARGET, tiny_family_config(family, TARGET), seed=3).drafter.config


@pytest.mark.parametrize("family", ["domino", "dspark", "dflare"])
def test_tensors_win_over_an_architecture_that_says_plain_dflash(family):
    config, shapes = published(family)
    config["architectures"] = ["DFlashDraftModel"]
    told = find_options(config, shapes, {"is_shifted": True})
    assert (told["head"] or {}).get("kind") == {"domino": "gru", "dspark": "rnn_markov", "dflare": None}[family]
    assert told["fusion"] == ("per_layer" if family == "dflare" else "concatenated")


def test_a_head_whose_alignment_nobody_states_is_not_guessed():
    config, shapes = published("dspark")
    config["architectures"] = ["DFlashDraftModel"]
    with pytest.raises(ValueError, match="not known which position a slot predicts; pass --alignment next"):
        find_options(config, shapes)


@pytest.mark.parametrize(
    ("family", "changes", "tensor", "message"),
    [
        ("domino", {}, "prefix_gru", "config.json describes a head .* of which the checkpoint holds no tensor"),
        ("dspark", {}, "confidence_head", "config.json describes a confidence .* of which the checkpoint holds no tensor"),
        ("dflare", {}, "layer_fusion_weights", "describes a DFlare drafter but the checkpoint holds no layer_fusion_weights"),
        ("dspark", {"markov_rank": 12}, None, "size is 12 in config.json, 11 in the tensors"),
        ("dspark", {"markov_head_type": "gated"}, None, "kind is gated_markov in config.json, rnn_markov in the tensors"),
    ],
)
def test_a_config_that_the_tensors_deny_is_refused(family, changes, tensor, message):
    config, shapes = published(family)
    shapes = {key: shape for key, shape in shapes.items() if tensor is None or tensor not in key}
    with pytest.raises(ValueError, match=message):
        find_options({**config, **changes}, shapes)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("candidate_selector.successor_codebook", "DFlash 2"),
        ("layers.0.attention_conv.base_kernel", "DFlash 2"),
        ("hidden_correction.gate_proj.weight", "hidden correction"),
        ("mtp.0.main_proj.weight", "DeepSeek-V4 bundle"),
        ("layers.0.mlp.up_proj.weight_scale", "quantised checkpoint"),
        ("layer_fusion_weights", "DFly"),
    ],
)
def test_known_families_that_are_not_implemented_are_refused_by_name(key, name):
    config, shapes = published("domino")
    with pytest.raises(ValueError, match=f"{name}.*which is not supported yet; use "):
        find_options(config, {**shapes, key: (3, 5)})


def test_a_mask_embedding_beside_the_drafter_is_not_ignored(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_family_config("domino", TARGET)))
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding.pt.* is not supported yet"):
        convert(None, tmp_path, tmp_path / "out", pair="stories260k", dry_run=True)


def test_the_command_line_states_alignment_number_of_drafts_and_calibration(tmp_path, capsys):
    models = small_models(3, family="dspark")
    config, _ = published("dspark")
    checkpoint.save(tmp_path / "target", models._replace(drafter=None), target_config=tiny_llama_config(num_hidden_layers=2))
    tensors = export_tensors(models.drafter, drafter_table(models.drafter.config))
    (tmp_path / "drafter").mkdir()
    save_file(tensors, tmp_path / "drafter/model.safetensors")
    config |= {"num_target_layers": 2}
    config["dflash_config"] = {**config["dflash_config"], "target_layer_ids": [0, 1]}
    (tmp_path / "drafter/config.json").write_text(json.dumps(config))
    (tmp_path / "calibration.json").write_text(json.dumps({"temperatures": [1.0, 2.0, 0.5], "num_samples": 7}))
    given = ["--pair", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--out", str(tmp_path / "out")]
    main([*given, "--alignment", "own", "--num-drafts", "3", "--calibration", str(tmp_path / "calibration.json")])
    read = checkpoint.load_drafter(tmp_path / "out").config
    assert (read.is_shifted, read.num_drafts, read.confidence.temperatures) == (False, 3, (1.0, 2.0, 0.5))
    with pytest.raises(SystemExit):
        main([*given, "--overwrite", "--num-drafts", "4", "--calibration", str(tmp_path / "calibration.json")])
    assert "confidence_temperatures must be 4 positive finite numbers" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--pair", str(tmp_path / "out"), "--out", str(tmp_path / "again"), "--num-drafts", "2"])
    assert "num_drafts are for a drafter that is converted from PyTorch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ids",
    [[3, 5, 61], [-1, 5, 7], [5, 5, 7], [7, 5, 8], [3, 5, 2**40], [3, 5, 2**32 + 9]],
    ids=["beyond", "negative", "twice", "falling", "huge", "wrapping"],
)
def test_a_draft_vocabulary_that_maps_to_no_token_is_refused(tmp_path, ids):
    config = tiny_family_config("dspark_dflare", TARGET, reanchor_jax={"has_head": True, "draft_vocab_size": 3})
    drafter = random_models(TARGET, config, seed=3).drafter
    tensors = export_tensors(drafter, drafter_table(drafter.config))
    tensors["d2t"] = np.asarray(ids, np.int64) - np.arange(3)
    save_file(tensors, tmp_path / "model.safetensors")
    del config[huggingface.OPTIONS]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint.save(tmp_path / "target", random_models(TARGET, None, seed=5), target_config=TARGET)
    with pytest.raises(ConversionError, match=r"d2t: index \+ value must rise strictly within 0..60"):
        convert(None, tmp_path, tmp_path / "out", pair=tmp_path / "target", show_progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["markov_head.markov_w1.weight", "confidence_head.proj.weight"])
def test_a_vector_in_place_of_a_matrix_is_told(key):
    config, shapes = published("dspark")
    with pytest.raises(ValueError, match=rf"{key} must be a matrix; the checkpoint holds one of shape \[7\]"):
        find_options(config, {**shapes, key: (7,)})


@pytest.mark.parametrize("family", UNPUBLISHED)
def test_a_family_of_ours_alone_is_kept_joined_to_a_pair_and_told_but_never_exported_or_converted(tmp_path, family):
    config = tiny_family_config(family, TARGET)
    drafter = random_models(TARGET, config, seed=3).drafter
    checkpoint.save_drafter(tmp_path / "drafter", drafter, drafter_config=config)
    checkpoint.save(tmp_path / "target", random_models(TARGET, None, seed=5), target_config=TARGET)
    joined = convert(None, tmp_path / "drafter", tmp_path / "joined", pair=tmp_path / "target", show_progress=False)
    read = checkpoint.load_drafter(joined)
    assert read.config == drafter.config
    for path, value in checkpoint.leaves(drafter).items():
        np.testing.assert_array_equal(checkpoint.leaves(read)[path], value, err_msg=path)
    told = inspection.describe(joined)
    assert ("refiner head" in told, "mixture of 3" in told) == (family.startswith("xpress"), family.endswith("dblast"))
    size = sum(
        value.nbytes for path in ("target", "drafter") for value in checkpoint.leaves(getattr(checkpoint.load(joined), path)).values()
    )
    assert inspection.memory_bytes(joined, batch=1, context=3)["weights"] == size
    name = "DBLast" if family == "dblast" else "xPress"
    for directory in ("drafter", "joined"):
        with pytest.raises(ValueError, match=f"{name} drafters have no PyTorch layout"):
            export_huggingface(tmp_path / directory, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    assert (export_huggingface(joined, tmp_path / "exported", parts=["target"]) / "target").is_dir()
    (tmp_path / "raw").mkdir()
    save_file({"norm.weight": np.ones(24, np.float32)}, tmp_path / "raw/model.safetensors")
    (tmp_path / "raw/config.json").write_text(json.dumps(config))
    message = "drafters have no PyTorch layout" if family == "dblast" else "describes a head .* of which the checkpoint holds no tensor"
    with pytest.raises(ValueError, match=message):
        convert(None, tmp_path / "raw", tmp_path / "out", pair=tmp_path / "target", dry_run=True)


def test_what_only_conversion_knew_survives_an_export(tmp_path):
    config, _ = published("dspark")
    options = {**huggingface.read_options(config), "is_shifted": False, "num_drafts": 3}
    options["confidence"] = {**options["confidence"], "temperatures": [1.0, 2.0, 0.5]}
    config[huggingface.OPTIONS] = options
    drafter = random_models(TARGET, config, seed=3).drafter
    checkpoint.save_drafter(tmp_path / "drafter", drafter, drafter_config=config)
    export_huggingface(tmp_path / "drafter", tmp_path / "exported")
    checkpoint.save(tmp_path / "target", random_models(TARGET, None, seed=5), target_config=TARGET)
    again = convert(None, tmp_path / "exported/drafter", tmp_path / "again", pair=tmp_path / "target", show_progress=False)
    assert checkpoint.load_drafter(again).config == drafter.config
