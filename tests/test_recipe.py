"""Making a drafter: what cannot be is told before anything is sampled, and damage to what a run has stored is told by file."""

import json

import jax
import numpy as np
import pytest
from tiny import tiny_models

from reanchor_jax import checkpoint
from reanchor_jax.cli import main
from reanchor_jax.training import recipe
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig

STORIES = [f"Once upon a time there was a cat named Tom, the {place}th of its kind, who liked to play in the sun." for place in range(7)]


def make(out, texts, encode, **changes):
    sizes = {"num_sequences": 4, "sequence_length": 24, "longest_prompt": 8, "num_held_out": 1, **changes}
    return recipe.make_drafter(
        tiny_models(3).target,
        texts,
        encode,
        rollout_config=recipe.RolloutConfig(**sizes),
        shape=DrafterShape(mask_token_id=3, block_size=8, num_heads=2, num_layers=1),
        config=TrainConfig(num_steps=1),
        out=out,
        sources={},
        show_progress=False,
    )


@pytest.mark.parametrize(
    ("lengths", "changes", "rule"),
    [
        (
            [40, 40, 9],
            {"longest_prompt": 17},
            r"longest_prompt \(17\) must leave room for a block of 8 in sequence_length \(24\): at most 16",
        ),
        ([7, 5, 40], {}, "no text to train on has 8 tokens or more; give longer texts"),
        ([17, 40, 9], {"is_chat": True, "longest_prompt": 16}, r"no text to train on has 8..16 tokens; raise longest_prompt"),
        ([40, 40, 9], {}, "no held-out text has 32 tokens or more"),
    ],
)
def test_texts_of_lengths_that_cannot_be_used_are_told_before_a_folder_is_made(tmp_path, lengths, changes, rule):
    with pytest.raises(ValueError, match=rule):
        make(tmp_path / "out", list(map(str, lengths)), lambda text: [1] * int(text), **changes)
    assert not (tmp_path / "out").exists()


def test_a_text_with_a_token_the_target_does_not_know_is_told_by_its_place(tmp_path):
    vocab_size = tiny_models(3).target.config.vocab_size
    with pytest.raises(ValueError, match=rf"text 2 holds token id {vocab_size}, outside the target's vocabulary 0..{vocab_size - 1}"):
        make(tmp_path / "out", ["a", "b", "a"], lambda text: [1] * 40 + [vocab_size] * (text == "b"))


def test_a_place_that_cannot_take_the_drafter_is_told_before_anything_runs(tmp_path):
    def encode(text):
        return [1] * 40

    (tmp_path / "one" / "drafter").mkdir(parents=True)
    (tmp_path / "one" / "drafter" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="drafter was not written by this package"):
        make(tmp_path / "one", ["a", "b"], encode)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "checkpoints").write_text("mine")
    with pytest.raises(FileExistsError, match="checkpoints is no folder"):
        make(tmp_path / "two", ["a", "b"], encode)
    assert not (tmp_path / "two" / "recipe.json").exists()


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: whole[:200] + b"?" + whole[201:]]
)
def test_damaged_rollouts_are_told_by_their_file(tmp_path, damage):
    rollouts = recipe.Rollouts(tokens=np.arange(600, dtype=np.int32).reshape(6, 100), starts=np.full(6, 3))
    path = tmp_path / "rollouts.npz"
    recipe._save_rollouts(path, rollouts, {"seed": 1}, vocab_size=600)
    assert np.array_equal(recipe._load_rollouts(path, {"seed": 1}).tokens, rollouts.tokens)
    assert recipe._load_rollouts(path, {"seed": 2}) is None
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"rollouts.npz cannot be read .*; remove it to sample again"):
        recipe._load_rollouts(path, {"seed": 1})
    np.save(tmp_path / "other.npy", rollouts.tokens)
    path.write_bytes((tmp_path / "other.npy").read_bytes())
    with pytest.raises(ValueError, match="remove it to sample again"):
        recipe._load_rollouts(path, {"seed": 1})


def test_a_start_without_a_name_and_texts_that_are_no_text_are_refused(tmp_path, capsys):
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"prompt": story}) + "\n" for story in [*STORIES[:3], "abc \ud800 def"]))
    given = [
        "train",
        "--pair",
        "stories260k",
        "--prompts",
        str(path),
        "--num-steps",
        "1",
        "--num-held-out",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(given) == 2
    assert "text 4: the prompt is not valid UTF-8 text" in capsys.readouterr().err
    assert main([*given, "--start", ""]) == 2
    assert main([*given, "--mesh", "0,1"]) == 2
    assert "both axes of a mesh must be at least 1; got 0 by 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_recipe_file_makes_a_drafter_whose_confidences_are_calibrated(tmp_path):
    stories = tmp_path / "stories.jsonl"
    stories.write_text("".join(json.dumps({"prompt": f"{story} {story}"}) + "\n" for story in STORIES))
    wanted = {
        "rollouts": {"num_sequences": 8, "sequence_length": 48, "longest_prompt": 16, "num_held_out": 3},
        "drafter": {"num_layers": 1, "block_size": 5, "window": 16},
        "training": {"family": "dspark", "num_steps": 3, "batch_size": 2, "num_anchors": 3, "weighting": "d-pace"},
    }
    (tmp_path / "mine.json").write_text(json.dumps(wanted))
    out = tmp_path / "run"
    given = ["train", "--pair", "stories260k", "--prompts", str(stories), "--recipe", str(tmp_path / "mine.json"), "--out", str(out)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax relies on both
        assert main(given) == 0
    drafter = checkpoint.load_drafter(out / "drafter")
    told = json.loads((out / "drafter" / "provenance.json").read_text())["drafter"]
    assert told["training"]["weighting"] == "d-pace"
    assert told["calibration"]["num_blocks"] > 0
    config = json.loads((out / "drafter" / "drafter_config.json").read_text())
    found = config["dflash_config"]["confidence_temperatures"]
    assert len(found) == drafter.config.num_drafts
    assert list(drafter.confidence.config.temperatures) == found
    assert found != [1.0] * len(found)
