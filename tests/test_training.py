"""Training: packed blocks equal decoding, the loss equals a slow oracle, a resumed run equals an uninterrupted one."""

import argparse
import functools
import json
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_models, tiny_drafter_config, tiny_family_config, tiny_llama_config, tiny_models

from reanchor_jax import checkpoint, huggingface, pairs
from reanchor_jax.arguments import add_fields, read_fields
from reanchor_jax.cache import Committed, init_cache, write
from reanchor_jax.config import check_pair
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.models.drafter import Models
from reanchor_jax.text import pad_prompts, pin_settings
from reanchor_jax.training import recipe, trainer
from reanchor_jax.training.families import FAMILIES
from reanchor_jax.training.losses import slot_weights
from reanchor_jax.training.packed import packed_block_states, packed_blocks
from reanchor_jax.training.rollouts import Rollouts, cut_prompts, mixed_rollouts, roll_out
from reanchor_jax.training.settings import read_recipe, recipe_names
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig, draw_batch, init_drafter, train, warm_start

LENGTH = 23
PACKED = jax.jit(packed_block_states)
SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 6}
SHAPES = {
    "full": {},
    "sliding, causal in the block": SLIDING,
    "sliding, both ways in the block": {**SLIDING, "is_causal": False},
    "one layer of each": {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]},
}


def pair(shape: str) -> Models:
    target = tiny_llama_config()
    return random_models(target, tiny_drafter_config(target, **SHAPES[shape]), seed=3)


@functools.partial(jax.jit, static_argnums=2)
def tapped(target, tokens, target_layer_ids):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return target(tokens, positions, prompt_mask(tokens.shape[1]), target_layer_ids=target_layer_ids).taps


def sequences(models: Models, rows: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(models.target.config.vocab_size, size=(rows, LENGTH)), jnp.int32)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_blocks_equal_the_blocks_that_decoding_runs_from_the_same_anchor(shape):
    models = pair(shape)
    target, drafter = models
    tokens = sequences(models, 2)
    anchors = jnp.asarray([[1, 9, 16], [4, 12, 15]], jnp.int32)
    taps = tapped(target, tokens, drafter.config.target_layer_ids)
    packed = PACKED(drafter, target, taps, tokens, anchors)

    @jax.jit
    def decode(target, drafter, taps, anchors):
        positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], tokens.shape)
        empty = init_cache(drafter.config.layers, num_rows=2, num_slots=64, dtype=jnp.float32)
        context = drafter.context_keys_values(drafter.features(taps), positions)
        cache = write(empty, context, jnp.zeros((2,), jnp.int32))
        slots = jnp.arange(drafter.config.block_size, dtype=jnp.int32)[None]
        first = jnp.take_along_axis(tokens, anchors[:, None], axis=1)
        block = jnp.where(slots == 0, first, drafter.config.mask_token_id)
        committed = Committed(layers=cache, lengths=anchors)
        return drafter.block_states(target.embedding(block), anchors[:, None] + slots, committed=committed)

    for column in range(anchors.shape[1]):
        np.testing.assert_allclose(packed[:, column], decode(target, drafter, taps, anchors[:, column]), atol=2e-5)


def test_nothing_after_an_anchor_reaches_its_block():
    models = pair("full")
    tokens = sequences(models, 1)
    anchors = jnp.asarray([[5]], jnp.int32)
    taps = tapped(models.target, tokens, models.drafter.config.target_layer_ids)
    gradient = jax.jit(jax.grad(lambda taps: packed_block_states(models.drafter, models.target, taps, tokens, anchors).sum()))(taps)
    assert np.abs(gradient[0, :5]).min(axis=-1).max() > 0
    assert not np.asarray(gradient[0, 5:]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_promotes")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_trained_as_its_recipe_makes_it_and_only_under_its_name(tmp_path, family):
    target = tiny_models(5).target
    shape = DrafterShape(mask_token_id=60, num_layers=2, num_heads=2, block_size=5, causal_size=6, causal_width=7)
    drafter = init_drafter(huggingface.read_drafter(shape.huggingface(target.config, family)), target, seed=1)
    rollouts = Rollouts(tokens=np.tile(np.arange(LENGTH, dtype=np.int32) % 5, (4, 1)), starts=np.full((4,), 2))
    changes = {"batch_size": 4, "num_anchors": 6, "learning_rate": 0.02, "num_warmup": 1, "num_recorded": 4, "optimizer": "muon"}
    config = TrainConfig(family=family, num_steps=12, checkpoint_steps=50, evaluation_steps=4, **changes)
    trained = train(drafter, target, rollouts, config=config, out=tmp_path, evaluate=lambda _: {"tau": 1.0}, show_progress=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    before, after = checkpoint.leaves(drafter), checkpoint.leaves(trained)
    still = {path for path, value in before.items() if np.array_equal(value, after[path])}
    assert not still
    plain = {"dflash", "draft-opd", "draft-opd-prefixes"}  # drafters of one kind
    for other in FAMILIES.keys() - ({family} if family not in plain else plain):
        with pytest.raises(ValueError, match=f"a drafter with head .* is not of the family {other}"):
            train(drafter, target, rollouts, config=TrainConfig(family=other, num_steps=1), out=tmp_path, show_progress=False)


def test_a_step_draws_the_same_batch_whenever_it_is_run_and_anchors_leave_room_for_a_block():
    rng = np.random.default_rng(0)
    rollouts = Rollouts(tokens=rng.integers(61, size=(9, LENGTH)).astype(np.int32), starts=rng.integers(1, LENGTH - 6, size=9))
    config = TrainConfig(num_steps=5, batch_size=7, num_anchors=11)
    tokens, anchors, *_ = draw_batch(rollouts, config=config, block_size=7, step=3)
    again = draw_batch(rollouts, config=config, block_size=7, step=3)
    assert np.array_equal(tokens, again.tokens)
    assert np.array_equal(anchors, again.anchors)
    other = draw_batch(rollouts, config=config, block_size=7, step=4)
    assert not np.array_equal(anchors, other.anchors)
    starts = {row.tobytes(): start for row, start in zip(rollouts.tokens, rollouts.starts, strict=True)}
    first = np.asarray([starts[row.tobytes()] for row in tokens])
    assert (anchors >= first[:, None]).all()
    assert (anchors <= LENGTH - 7).all()


@pytest.fixture
def as_optax_promotes():
    """optax mixes step counts with floats, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.usefixtures("as_optax_promotes")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_resumed_from_its_checkpoint_ends_with_the_same_weights_and_learns(tmp_path, optimizer):
    models = tiny_models(5)
    rollouts = Rollouts(tokens=np.tile(np.arange(LENGTH, dtype=np.int32) % 5, (4, 1)), starts=np.full((4,), 2))
    fresh = init_drafter(models.drafter.config, models.target, seed=1)
    config = TrainConfig(
        num_steps=7,
        batch_size=3,
        num_anchors=4,
        optimizer=optimizer,
        learning_rate=0.01,
        num_warmup=1,
        checkpoint_steps=4,
        evaluation_steps=3,
    )

    def run(out, evaluate=None):
        return checkpoint.leaves(train(fresh, models.target, rollouts, config=config, out=out, evaluate=evaluate, show_progress=False))

    whole = run(tmp_path / "whole")

    class Stop(Exception):
        pass

    calls = []

    def stop_at_second(drafter):
        calls.append(1)
        if len(calls) == 2:
            raise Stop
        return {"tau": 1.0}

    with pytest.raises(Stop):
        run(tmp_path / "broken", evaluate=stop_at_second)
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir() if path.name.isdigit()] == ["4"]
    resumed = run(tmp_path / "broken")  # three steps are run again
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    # but for the figures of evaluations, which only the broken run had
    logs = [[json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()] for name in ("whole", "broken")]
    assert [{name: line[name] for name in ("step", "loss", "hit_rates")} for line in logs[1]] == logs[0]


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_promotes")
def test_a_loss_that_is_no_number_ends_the_run_before_anything_of_it_is_kept(tmp_path):
    models = tiny_models(5)
    weights = {path: jnp.full_like(value, jnp.nan) for path, value in checkpoint.leaves(models.drafter).items()}
    rollouts = Rollouts(tokens=np.asarray(sequences(models, 4)), starts=np.full((4,), 2))
    config = TrainConfig(num_steps=3, batch_size=2, num_anchors=2, checkpoint_steps=1, evaluation_steps=1)
    broken = checkpoint.with_leaves(models.drafter, weights)
    with pytest.raises(ValueError, match="the loss of step 1 is nan; lower learning_rate"):
        train(broken, models.target, rollouts, config=config, out=tmp_path, show_progress=False)
    assert not (tmp_path / "log.jsonl").exists()
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.mark.parametrize("line", ["[1]", '{"loss": 1}', '{"step": "2"}', "garbage", "\0\0"])
def test_a_line_that_is_none_of_a_log_is_told_by_its_place(tmp_path, line):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"log.jsonl line 2 is not a line of a training log; remove that line"):
        trainer._keep_log(tmp_path / "log.jsonl", 3)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"step": 4}\n{"ste')  # the last one cut short, as by a kill
    trainer._keep_log(tmp_path / "log.jsonl", 3)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_promotes")
def test_a_checkpoint_cut_short_is_passed_over_for_the_one_before_it(tmp_path, capsys):
    models = tiny_models(5)
    rollouts = Rollouts(tokens=np.tile(np.arange(LENGTH, dtype=np.int32) % 5, (4, 1)), starts=np.full((4,), 2))
    config = TrainConfig(num_steps=3, batch_size=2, num_anchors=2, checkpoint_steps=1, evaluation_steps=1, num_warmup=1)

    def run(out):
        return checkpoint.leaves(train(models.drafter, models.target, rollouts, config=config, out=out, show_progress=False))

    whole = run(tmp_path)
    newest = tmp_path / "checkpoints" / "3"
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    again = run(tmp_path)
    assert "checkpoint 3 cannot be read, so the one before it is used" in capsys.readouterr().out
    for name, value in whole.items():
        np.testing.assert_array_equal(value, again[name], err_msg=name)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    for file in (tmp_path / "checkpoints").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"no checkpoint of .* can be read .*take the version that wrote it, or another folder"):
        run(tmp_path)


def test_a_warm_start_takes_what_fits_and_says_what():
    models = pair("full")
    fresh = init_drafter(models.drafter.config, models.target, seed=7)
    drafter, taken = warm_start(fresh, models.drafter)
    assert taken == sorted(checkpoint.leaves(models.drafter))
    target = tiny_llama_config()
    other = random_models(target, tiny_drafter_config(target, num_hidden_layers=1, layer_types=["full_attention"]), seed=4)
    drafter, taken = warm_start(fresh, other.drafter)
    assert taken == sorted(path for path in checkpoint.leaves(models.drafter) if not path.startswith("layers/1/"))
    for path, value in checkpoint.leaves(drafter).items():
        expected = checkpoint.leaves(other.drafter if path in taken else fresh)[path]
        np.testing.assert_array_equal(value, expected, err_msg=path)
    half, _ = warm_start(init_drafter(models.drafter.config, tiny_models(3, dtype=jnp.bfloat16).target, seed=7), models.drafter)
    assert {value.dtype for value in checkpoint.leaves(half).values()} == {jnp.dtype(jnp.bfloat16)}


def test_a_start_that_does_not_fit_is_refused_before_anything_is_sampled(tmp_path):
    target = tiny_models(3).target
    wide = tiny_llama_config(hidden_size=26)
    start = random_models(wide, tiny_drafter_config(wide), seed=0).drafter
    with pytest.raises(ValueError, match="no weight of the start fits this drafter"):
        recipe.make_drafter(
            target,
            ["a text", "another"],
            lambda text: [1] * 40,
            rollout_config=recipe.RolloutConfig(sequence_length=40, longest_prompt=8, num_held_out=1),
            shape=DrafterShape(mask_token_id=3, block_size=8, num_heads=2, num_layers=1),
            config=TrainConfig(num_steps=1),
            out=tmp_path / "out",
            sources={},
            start=start,
        )
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_run_of_other_settings_is_refused(tmp_path):
    models = tiny_models(5)
    rollouts = Rollouts(tokens=np.zeros((2, LENGTH), np.int32), starts=np.full((2,), 2))
    pin_settings(tmp_path / "train_config.json", asdict(TrainConfig(num_steps=1, batch_size=2)))
    other = TrainConfig(num_steps=1, batch_size=2, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"other settings \(learning_rate\)"):
        train(models.drafter, models.target, rollouts, config=other, out=tmp_path, show_progress=False)


def test_sequences_too_short_for_a_block_are_refused(tmp_path):
    models = tiny_models(5)
    rollouts = Rollouts(tokens=np.zeros((2, 8), np.int32), starts=np.ones((2,), np.int64))
    with pytest.raises(ValueError, match="8 tokens, 1 of them a prompt's, are too short for blocks of 7"):
        train(models.drafter, models.target, rollouts, config=TrainConfig(num_steps=1), out=tmp_path, show_progress=False)


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_promotes")
def test_the_loss_compares_with_the_target_at_its_temperature(tmp_path):
    target = tiny_llama_config()
    models = random_models(target, tiny_family_config("dspark", target), seed=6)
    rollouts = Rollouts(tokens=np.asarray(sequences(models, 3)), starts=np.full(3, 2))
    losses = {}
    for temperature in (1.0, 0.25):
        config = TrainConfig(family="dspark", num_steps=1, batch_size=2, num_anchors=4, target_temperature=temperature)
        out = tmp_path / str(temperature)
        train(models.drafter, models.target, rollouts, config=config, out=out, show_progress=False)
        losses[temperature] = json.loads((out / "log.jsonl").read_text())["loss"]
        batch = draw_batch(rollouts, config=config, block_size=models.drafter.config.block_size, step=0)
        blocks = packed_blocks(models.drafter, models.target, jnp.asarray(batch.tokens), jnp.asarray(batch.anchors))
        blocks = blocks._replace(target_logits=blocks.target_logits / temperature)
        weights = slot_weights(blocks.is_inside, decay=config.decay)
        expected = FAMILIES["dspark"].loss(models.drafter, models.target, blocks, weights, jnp.float32(0)).loss
        assert losses[temperature] == pytest.approx(float(expected), rel=1e-5)
    assert abs(losses[1.0] - losses[0.25]) > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("as_optax_promotes")
def test_a_run_that_learns_from_its_own_drafts_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(tmp_path):
    models = tiny_models(5)
    rng = np.random.default_rng(0)
    rollouts = Rollouts(tokens=rng.integers(61, size=(6, LENGTH)).astype(np.int32), starts=np.full((6,), 4))
    config = TrainConfig(
        family="draft-opd",
        num_steps=5,
        batch_size=2,
        num_anchors=3,
        learning_rate=0.01,
        num_warmup=1,
        refresh_steps=2,
        num_recorded=4,
        decoding_temperature=0.7,
        checkpoint_steps=2,
        evaluation_steps=1,
    )

    def run(out, stop_at=None):
        calls = []

        def evaluate(drafter):
            calls.append(drafter)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return {"tau": 1.0}

        trained = train(models.drafter, models.target, rollouts, config=config, out=out, evaluate=evaluate, show_progress=False)
        return checkpoint.leaves(trained)

    whole = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", stop_at=3)
    resumed = run(tmp_path / "broken")
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name], err_msg=name)
    with pytest.raises(ValueError, match=r"checkpoint_steps \(3\) must be a multiple of refresh_steps \(2\)"):
        TrainConfig(family="draft-opd", num_steps=5, checkpoint_steps=3, refresh_steps=2)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_of_the_package_makes_a_drafter_for_the_embedded_target(name):
    found = read_recipe(name)
    recipe.RolloutConfig(**found.rollouts)
    config = TrainConfig(**found.training)
    target = checkpoint.read_target_config(checkpoint.read_contents(pairs.path("stories260k")), pairs.path("stories260k"))
    drafter = huggingface.read_drafter(DrafterShape(**{"mask_token_id": 0} | found.drafter).huggingface(target, config.family))
    check_pair(target, drafter)
    kinds = {"domino": "gru", "dspark": "markov", "xpress": "refiner"}
    assert (drafter.head.kind if drafter.head else None) == kinds.get(config.family)
    assert (drafter.fusion == "per_layer") == (config.family == "dflare")
    assert (drafter.mixture is not None) == (config.family == "dblast")
    assert drafter.is_shifted == (drafter.confidence is not None) == (config.family == "dspark")
    assert drafter.num_drafts == {"dbloom": 23, "smollm2": 7}.get(name, 15)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"training": {"num_steps": "9"}}, "training.num_steps must be int; got '9'"),
        ({"training": {"learning_rate": [1]}}, r"training.learning_rate must be float; got \[1\]"),
        ({"rollouts": {"is_chat": 1}}, "rollouts.is_chat must be bool; got 1"),
        ({"training": {"speed": 1}}, "training must be an object of family, num_steps"),
        ({"drafter": {"target_layer_ids": 3}}, "drafter.target_layer_ids must be .*; got 3"),
        ({"start": 4}, "start must be a pair's name or a path; got 4"),
        ({"family": "domino"}, "holds family; a recipe has rollouts, drafter, training and start"),
    ],
)
def test_a_recipe_with_an_entry_of_another_kind_is_refused_by_its_name(tmp_path, content, message):
    (tmp_path / "mine.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_recipe(tmp_path / "mine.json")
    with pytest.raises(FileNotFoundError, match="neither a file nor a recipe; recipes are: dblast, dbloom, dflare"):
        read_recipe(tmp_path / "other")


def test_a_recipe_of_the_user_s_own_names_its_start_from_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    for start, expected in (("stories260k/domino", "stories260k/domino"), ("mine", str(tmp_path / "mine")), ("/other", "/other")):
        (tmp_path / "recipe.json").write_text(json.dumps({"start": start}))
        assert read_recipe(tmp_path / "recipe.json").start == expected


@pytest.mark.parametrize(("flags", "is_chat"), [([], True), (["--no-chat"], False), (["--chat"], True)])
def test_a_flag_wins_over_a_recipe_in_either_direction(flags, is_chat):
    parser = argparse.ArgumentParser()
    add_fields(parser, recipe.RolloutConfig)
    assert read_fields(parser.parse_args(flags), recipe.RolloutConfig, is_chat=True).is_chat == is_chat


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_steps", 0, "num_steps must be a whole number in 1"),
        ("num_anchors", 10**18, "num_anchors must be a whole number in 1..2147483647"),
        ("decay", -1.0, "decay must be 0 or more"),
        ("decay", float("nan"), "decay must be 0 or more, and a number float32 can hold; got nan"),
        ("weight_decay", -0.1, "weight_decay must be 0 or more"),
        ("emphasis", 0.0, "emphasis must be more than 0"),
        ("target_temperature", 0.0, "target_temperature must be more than 0"),
        ("learning_rate", float("inf"), "learning_rate must be more than 0, and a number float32 can hold; got inf"),
        ("weight_decay", float("inf"), "weight_decay must be 0 or more, and a number float32 can hold; got inf"),
        ("weighting", "paced", "weighting must be one of decay, d-pace; got 'paced'"),
        ("decoding_temperature", -0.5, "decoding_temperature must be 0 or more"),
        ("decoding_temperature", float("inf"), "decoding_temperature must be 0 or more, and a number float32 can hold; got inf"),
        (
            "family",
            "eagle",
            "family must be one of dflash, dflare, domino, dspark, xpress, dblast, draft-opd, draft-opd-prefixes; got 'eagle'",
        ),
        ("optimizer", "sgd", "adamw or muon"),
        ("seed", -1, "seed must be a whole number in 0"),
        ("seed", 2**70, "seed must be a whole number in 0"),
        ("num_warmup", -2, "num_warmup must be a whole number in 0"),
    ],
)
def test_bad_training_settings_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"num_steps": 3, field: value})


@pytest.mark.parametrize(("family", "length"), [("dflash", 9), ("dflash", 513), ("dspark", 10), ("dflash", 10**12)])
def test_a_sequence_length_that_fits_no_block_or_not_the_target_is_refused_before_anything_is_sampled(tmp_path, family, length):
    rollout_config = recipe.RolloutConfig(sequence_length=length, longest_prompt=8)
    with pytest.raises(ValueError, match=rf"sequence_length \({length}\) must lie in {10 + (family == 'dspark')}\.\.512"):
        recipe.make_drafter(
            tiny_models(3).target,
            [],
            lambda text: pytest.fail("a text was read"),
            rollout_config=rollout_config,
            shape=DrafterShape(mask_token_id=3, block_size=8),
            config=TrainConfig(family=family, num_steps=1),
            out=tmp_path / "out",
            sources={},
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rollouts_continue_each_prompt_as_the_target_does():
    models = tiny_models(2, with_drafter=False)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]
    rollouts = roll_out(models.target, prompts, length=12, temperatures=[0.0, 0.0, 0.0], seed=0, num_rows=2, show_progress=False)
    assert rollouts.starts.tolist() == [3, 1, 5]
    for prompt, tokens in zip(prompts, rollouts.tokens, strict=True):
        assert tokens[: len(prompt)].tolist() == prompt
        positions = jnp.arange(12, dtype=jnp.int32)[None]
        output = models.target(jnp.asarray(tokens)[None], positions, jnp.tril(jnp.ones((1, 12, 12), bool)))
        greedy = np.argmax(models.target.logits(output.states)[0], axis=-1)
        assert tokens[len(prompt) :].tolist() == greedy[len(prompt) - 1 : -1].tolist()


@pytest.mark.slow
def test_mixed_rollouts_hold_texts_and_the_targets_own_beginnings():
    models = tiny_models(2, with_drafter=False)
    texts = [[7] * 20, [8] * 30]
    rollouts = mixed_rollouts(
        models.target, texts, count=8, length=24, longest_prompt=10, own_prefix_rate=0.5, sampled_rate=0.5, seed=0, show_progress=False
    )
    assert rollouts.tokens.shape == (8, 24)
    from_texts = [row[:start].tolist() in ([7] * start, [8] * start) for row, start in zip(rollouts.tokens, rollouts.starts, strict=True)]
    assert from_texts[:4] == [True] * 4
    assert set(rollouts.tokens[4:, 0].tolist()) <= {7, 8}


def test_prompts_are_beginnings_of_long_enough_texts():
    prompts = cut_prompts([[1] * 3, list(range(40))], count=20, shortest=5, longest=9, seed=1)
    assert all(prompt == list(range(len(prompt))) and 5 <= len(prompt) <= 9 for prompt in prompts)
    with pytest.raises(ValueError, match="has 50 tokens or more"):
        cut_prompts([[1] * 3], count=1, shortest=50, longest=60, seed=0)


@pytest.mark.slow
def test_messages_are_answered_whole_and_too_long_ones_are_left_out():
    models = tiny_models(2, with_drafter=False)
    texts = [[7] * 9, [8] * 11, [9] * 12]
    given = {"length": 20, "longest_prompt": 11, "own_prefix_rate": 0.5, "sampled_rate": 0.0, "seed": 0, "show_progress": False}
    rollouts = mixed_rollouts(models.target, texts, count=6, is_whole=True, **given)
    begun = [row[:start].tolist() for row, start in zip(rollouts.tokens, rollouts.starts, strict=True)]
    assert all(prompt in texts[:2] for prompt in begun)
    assert len({*map(len, begun)}) == 2
    with pytest.raises(ValueError, match="has 8 tokens or more"):
        mixed_rollouts(models.target, texts, count=6, is_whole=True, **{**given, "longest_prompt": 8})


def test_held_out_texts_are_decoded_from_their_beginnings_and_messages_whole():
    lengths = (5, 32, 40, 64, 65)
    texts = [list(range(length)) for length in lengths]
    begun = recipe._evaluated(texts, recipe.RolloutConfig())
    assert begun == [list(range(32))] * 4
    assert recipe._evaluated(texts, recipe.RolloutConfig(is_chat=True)) == texts[:4]
    tokens, sizes = pad_prompts(recipe._evaluated(texts, recipe.RolloutConfig(is_chat=True, longest_prompt=33)))
    assert sizes.tolist() == [5, 32]
    assert tokens.tolist() == [list(range(5)) + [0] * 27, list(range(32))]
    with pytest.raises(ValueError, match="no held-out text has 32 tokens or more"):
        recipe._evaluated(texts[:1], recipe.RolloutConfig())
    with pytest.raises(ValueError, match="no held-out text has 9 tokens or fewer"):
        recipe._evaluated(texts[1:], recipe.RolloutConfig(is_chat=True, longest_prompt=9))


def test_an_empty_prompt_is_refused_by_its_index():
    models = tiny_models(2, with_drafter=False)
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        roll_out(models.target, [[1], []], length=9, temperatures=[0.0, 0.0], seed=0)


@pytest.mark.slow
def test_muon_treats_maps_that_share_a_leaf_as_the_matrices_they_are():
    """The update of each share is that of a leaf of its own."""
    rng = np.random.default_rng(5)
    shapes = {
        "layers/0/mlp/gate_up/kernel": (6, 2, 10),
        "layers/0/attention/key_value/kernel": (6, 2, 2, 4),
        "contexts/0/kernel": (6, 2, 2, 4),
        "latent_mixture/up/kernel": (6, 2, 9),
    }
    gradients = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    gradients["layers/0/attention/query/kernel"] = jnp.asarray(rng.standard_normal((6, 2, 3, 4)), jnp.float32)
    apart = {f"{name}/{index}": gradients[name][:, index].reshape(6, -1) for name in shapes for index in range(2)}
    gradients["norm/scale"] = apart["norm/scale"] = jnp.asarray(rng.standard_normal(6), jnp.float32)
    mixer = gradients["causal_head/mixer"] = jnp.asarray(rng.standard_normal((3, 3, 5)), jnp.float32)  # no matrix: left to adamw
    apart["mixer"] = mixer.reshape(-1)
    apart["query"] = gradients["layers/0/attention/query/kernel"].reshape(6, -1)
    optimizer = trainer._optimizer(trainer.TrainConfig(num_steps=4, num_warmup=0, optimizer="muon", weight_decay=0.0))

    def update(gradients):
        return optimizer.update(gradients, optimizer.init(gradients), gradients)[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax relies on both
        joint, expected = update(gradients), update(apart)
    assert np.abs(expected["query"]).max() > 0
    for name in shapes:
        for index in range(2):
            np.testing.assert_allclose(joint[name][:, index].reshape(6, -1), expected[f"{name}/{index}"], rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(joint["layers/0/attention/query/kernel"].reshape(6, -1), expected["query"], rtol=2e-4, atol=1e-7)
    np.testing.assert_allclose(joint["causal_head/mixer"].reshape(-1), expected["mixer"], rtol=2e-4, atol=1e-7)
