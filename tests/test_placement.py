"""Training on a mesh of simulated devices: the same weights as on one, up to the order of sums."""

import json
import os
import subprocess
import sys

import jax
import pytest

from reanchor_jax.training.placement import check_batch, make_mesh

PROGRAM = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, "tests")
import jax, numpy as np
from tiny import tiny_models
from reanchor_jax import checkpoint
from reanchor_jax.training.placement import make_mesh
from reanchor_jax.training.rollouts import Rollouts
from reanchor_jax.training.trainer import TrainConfig, train

assert len(jax.devices()) == 4
models = tiny_models(5)
tokens = np.random.default_rng(0).integers(models.target.config.vocab_size, size=(16, 23)).astype(np.int32)
rollouts = Rollouts(tokens=tokens, starts=np.full(16, 3))
seen = {}
for family in sys.argv[1:]:
    config = TrainConfig(family=family, num_steps=5, batch_size=4, num_anchors=3, checkpoint_steps=2, evaluation_steps=5,
                         refresh_steps=2, num_recorded=4, learning_rate=1e-3, num_warmup=1)
    for shape in (None, (1, 1), (4, 1), (2, 2), (1, 4)):
        mesh = None if shape is None else make_mesh(*shape)
        with tempfile.TemporaryDirectory() as out:
            trained = train(models.drafter, models.target, rollouts, config=config, out=Path(out), mesh=mesh, show_progress=False)
        weights = checkpoint.leaves(trained)
        if shape is None:
            seen[family] = weights
            continue
        assert all(len(value.devices()) == shape[0] * shape[1] for value in weights.values())
        divided = [name for name, value in weights.items() if value.sharding.shard_shape(value.shape) != value.shape]
        assert (len(divided) > 5) == (shape[1] > 1), divided
        for name, value in weights.items():
            np.testing.assert_allclose(np.asarray(value), np.asarray(seen[family][name]), atol=3e-5, err_msg=f"{family} {shape} {name}")
        print(family, shape)
"""


def simulated(*arguments: str) -> str:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    return subprocess.run([sys.executable, *arguments], check=True, env=environment, timeout=900, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_weights_trained_on_a_mesh_are_those_of_one_device():
    told = [line for line in simulated("-c", PROGRAM, "dflash", "draft-opd").splitlines() if not line.startswith("{")]
    assert len(told) == 8, told  # a family on a mesh each, beside the log


@pytest.mark.slow
def test_the_command_trains_on_a_mesh_and_what_it_writes_loads_on_one_device(tmp_path):
    story = "Once upon a time there was a cat who liked to play in the park with her friend Tom. They ran and ran until the sun went down."
    (tmp_path / "stories.jsonl").write_text((json.dumps({"prompt": story}) + "\n") * 5)
    sizes = "--num-sequences 12 --sequence-length 48 --longest-prompt 16 --num-held-out 1 --block-size 5 --num-layers 1 --window 16"
    steps = "--num-steps 4 --batch-size 4 --num-anchors 3 --checkpoint-steps 2 --evaluation-steps 4 --num-warmup 2 --mesh 2,2"
    out = tmp_path / "run"
    given = [
        "train",
        "--pair",
        "stories260k",
        "--prompts",
        str(tmp_path / "stories.jsonl"),
        "--out",
        str(out),
        *sizes.split(),
        *steps.split(),
    ]
    simulated("-c", "import sys; from reanchor_jax.cli import main; sys.exit(main(sys.argv[1:]))", *given)
    from reanchor_jax import checkpoint

    assert checkpoint.load_drafter(out / "drafter").config.block_size == 5
    assert json.loads((out / "log.jsonl").read_text())["tau"] >= 1


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=f"2 by {len(jax.devices())} needs {2 * len(jax.devices())} devices"):
        make_mesh(2, len(jax.devices()))
    with pytest.raises(ValueError, match="both axes of a mesh must be at least 1; got 0 by 1"):
        make_mesh(0, 1)
    with pytest.raises(ValueError, match="must have the axes data, model; got rows"):
        check_batch(jax.make_mesh((1,), ("rows",)), 3)
