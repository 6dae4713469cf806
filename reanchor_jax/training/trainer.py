"""Train a drafter for a frozen target: optax loop, Orbax checkpoints, resume.

In: a target, Rollouts, a TrainConfig.
Out: a trained drafter; `checkpoints/` and `log.jsonl` in the output folder as it goes.
Source: DFlash (arXiv 2602.06036). Batch and anchors of a step are drawn from (seed, step) alone, so a resumed run repeats nothing.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from reanchor_jax import checkpoint
from reanchor_jax.config import DrafterConfig
from reanchor_jax.models.drafter import Drafter
from reanchor_jax.models.target import Target
from reanchor_jax.text import pin_settings
from reanchor_jax.training.losses import dflash_loss
from reanchor_jax.training.rollouts import Rollouts

_FINAL_NORM_SCALE = 0.2  # of the target's: at 1.0 the untrained drafter's logits start at a cross-entropy of 28 nats


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained.

    num_steps: optimiser steps. batch_size: sequences a step. num_anchors: blocks drawn in each of them.
    decay: gamma of the slot weights exp(-(k-1)/gamma), in tokens.
    optimizer: adamw, or muon for matrices (each of those that share a leaf by itself) with adamw for the rest.
    learning_rate: its peak, after num_warmup steps; then a cosine down to a hundredth of it.
    checkpoint_steps: steps between checkpoints. evaluation_steps: steps between evaluations.
    """

    num_steps: int
    batch_size: int = 16
    num_anchors: int = 24
    decay: float = 7.0
    optimizer: str = "adamw"
    learning_rate: float = 4e-3
    num_warmup: int = 50
    weight_decay: float = 0.01
    checkpoint_steps: int = 200
    evaluation_steps: int = 500
    seed: int = 0

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "num_anchors", "checkpoint_steps", "evaluation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("num_warmup", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more; got {getattr(self, name)}.")
        for name in ("decay", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0; got {getattr(self, name)}.")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon; got {self.optimizer!r}.")


def init_drafter(config: DrafterConfig, target: Target, *, seed: int) -> Drafter:
    """A drafter with random weights and a final norm scaled to the target's head."""
    dtype = target.embedding.embedding[...].dtype
    drafter = Drafter(config, dtype=dtype, rngs=nnx.Rngs(seed))
    drafter.norm.scale[...] = _FINAL_NORM_SCALE * target.norm.scale[...]
    return drafter


def train(
    drafter: Drafter,
    target: Target,
    rollouts: Rollouts,
    *,
    config: TrainConfig,
    out: Path,
    evaluate: Callable[[Drafter], Mapping[str, float]] | None = None,
    show_progress: bool = True,
) -> Drafter:
    """Run (or resume) config.num_steps steps and return the trained drafter.

    out: folder for `checkpoints/`, `train_config.json` and `log.jsonl` (one line an evaluation). A run found there is resumed.
    evaluate: figures of a drafter, logged every evaluation_steps.
    Raises ValueError if `out` holds a run of another TrainConfig, or if the sequences are too short for a block.
    """
    if rollouts.tokens.shape[1] < drafter.config.block_size + 2:
        raise ValueError(f"sequences of {rollouts.tokens.shape[1]} tokens are too short for blocks of {drafter.config.block_size}.")
    out.mkdir(parents=True, exist_ok=True)
    pin_settings(out / "train_config.json", asdict(config))
    optimizer = _optimizer(config)
    weights = {name: jnp.copy(value) for name, value in checkpoint.leaves(drafter).items()}  # the caller's own would be donated
    state = {"weights": weights, "optimizer": optimizer.init(weights)}

    @partial(jax.jit, donate_argnums=0)
    def update(state, target, tokens, anchors):
        def loss_of(weights):
            return dflash_loss(checkpoint.with_leaves(drafter, weights), target, tokens, anchors, decay=config.decay)

        (loss, info), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["weights"])
        changes, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], changes), "optimizer": optimizer_state}, loss, info

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(out.absolute() / "checkpoints", options=options) as checkpoints:
        first = checkpoints.latest_step() or 0
        if first:
            state = checkpoints.restore(first, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))
        progress = tqdm(range(first, config.num_steps), initial=first, total=config.num_steps, unit="step", disable=not show_progress)
        smoothed = None
        for index in progress:
            tokens, anchors = draw_batch(rollouts, config=config, block_size=drafter.config.block_size, step=index)
            state, loss, info = update(state, target, jnp.asarray(tokens), jnp.asarray(anchors))
            smoothed = float(loss) if smoothed is None else 0.98 * smoothed + 0.02 * float(loss)
            progress.set_postfix(loss=f"{smoothed:.3f}", hit=f"{float(info.hit_rates[0]):.2f}", refresh=False)
            done = index + 1
            if done % config.checkpoint_steps == 0 or done == config.num_steps:
                checkpoints.save(done, args=ocp.args.StandardSave(state))
            if done % config.evaluation_steps == 0 or done == config.num_steps:
                record = {"step": done, "loss": smoothed, "hit_rates": np.asarray(info.hit_rates).round(4).tolist()}
                record |= dict(evaluate(checkpoint.with_leaves(drafter, state["weights"]))) if evaluate else {}
                with (out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                tqdm.write(json.dumps({name: value for name, value in record.items() if name != "hit_rates"}))
    return checkpoint.with_leaves(drafter, state["weights"])


def draw_batch(rollouts: Rollouts, *, config: TrainConfig, block_size: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences [B S] and block anchors [B C] of one step; anchors lie in the target's own text and leave a block's room."""
    rng = np.random.default_rng((config.seed, step))
    chosen = rng.integers(len(rollouts.tokens), size=config.batch_size)
    tokens = rollouts.tokens[chosen].astype(np.int32)
    last = tokens.shape[1] - block_size
    first = np.minimum(rollouts.starts[chosen], last)
    anchors = first[:, None] + (rng.random((config.batch_size, config.num_anchors)) * (last - first + 1)[:, None]).astype(np.int32)
    return tokens, anchors.astype(np.int32)


def _matrices(weights: Any) -> Any:
    """Which axes of each leaf, by path, are the inputs and outputs of a matrix; maps that one leaf holds beside each other stay apart."""

    def axes(path: str, leaf: Array | optax.MaskedNode) -> optax.contrib.MuonDimensionNumbers | None:
        if isinstance(leaf, optax.MaskedNode):  # optax asks again where it has taken out what is not a matrix
            return None
        if leaf.ndim == 2:
            return optax.contrib.MuonDimensionNumbers(0, 1)
        if path.endswith("/query/kernel"):
            return optax.contrib.MuonDimensionNumbers(0, (1, 2, 3))
        if path.endswith(("/key_value/kernel", "/key/kernel")) or path.startswith("contexts/"):
            return optax.contrib.MuonDimensionNumbers(0, (2, 3))
        return optax.contrib.MuonDimensionNumbers(0, 2) if path.endswith("/gate_up/kernel") else None

    return {path: axes(path, leaf) for path, leaf in weights.items()}


def _optimizer(config: TrainConfig) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.num_warmup, max(config.num_steps, config.num_warmup + 1), config.learning_rate / 100
    )
    if config.optimizer == "muon":
        inner = optax.contrib.muon(schedule, weight_decay=config.weight_decay, adam_b2=0.95, muon_weight_dimension_numbers=_matrices)
    else:
        inner = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)
