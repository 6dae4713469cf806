"""Train a drafter for a frozen target: optax loop, Orbax checkpoints, resume.

In: a target, Rollouts, a TrainConfig.
Out: a trained drafter; `checkpoints/` and `log.jsonl` in the output folder as it goes.
Source: DFlash (arXiv 2602.06036). Batch and anchors of a step are drawn from (seed, step) alone, and a family's own drafts from the
    weights of a step that has a checkpoint, so the steps that a resumed run repeats are the same steps, and its log is the same log.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array
from tqdm import tqdm

from reanchor_jax import checkpoint
from reanchor_jax.config import DrafterConfig
from reanchor_jax.fields import LARGEST, is_integer, is_number, is_positive
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.text import pin_settings, write_bytes
from reanchor_jax.training.families import FAMILIES
from reanchor_jax.training.losses import cross_entropy, hit_rates, reach_weights, slot_weights
from reanchor_jax.training.packed import Proposed, packed_blocks, proposed_logits
from reanchor_jax.training.placement import check_batch, place_rows, place_weights
from reanchor_jax.training.rollouts import Recorded, Rollouts, record_blocks

_WEIGHTINGS = ("decay", "d-pace")
_FINAL_NORM_SCALE = 0.2  # of the target's: at 1.0 the untrained drafter's logits start at a cross-entropy of 28 nats
_COMPONENT_SCALE = 0.1  # of a mixture's components at first: near the plain block, yet not alike


class Batch(NamedTuple):
    """What a step learns from. tokens: [B S]. anchors: [B C] positions. proposals [B C K1], num_accepted [B C]: of recorded blocks."""

    tokens: np.ndarray
    anchors: np.ndarray
    proposals: np.ndarray | None = None
    num_accepted: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a drafter is trained.

    family: what kind of drafter it is, and with what loss it is trained: dflash, dflare, domino, dspark, xpress, dblast, draft-opd or
        draft-opd-prefixes.
    num_steps: optimiser steps; to be given where no recipe says it. batch_size: sequences a step. num_anchors: blocks drawn in each.
    weighting: of slots: decay, or d-pace, by how many drafts hang on each as the drafter stands (`losses.reach_weights`).
    decay: gamma of the slot weights exp(-(k-1)/gamma), in tokens; 0 weighs all alike. With d-pace there is none.
    old_slots: drafted tokens that the drafter knew before (DBloom), or 0 where there is no such difference.
    emphasis: by how much more the tokens beyond old_slots weigh.
    target_temperature: of the target's distribution that drafts are compared with, in families that do: where much is decoded greedily, one
        below 1 is nearer to what is accepted.
    decoding_temperature: at which the drafter is to be used: that of evaluations, and of recordings in a family that learns from its own
        drafts.
    refresh_steps: steps between recordings, in a family that learns from its own drafts. num_recorded: rollouts of a recording.
    optimizer: adamw, or muon for matrices (each of those that share a leaf by itself) with adamw for the rest.
    learning_rate: its peak; from there a cosine falls to a hundredth of it. num_warmup: steps up to the peak.
    weight_decay: share of a weight taken off a step, times the learning rate.
    checkpoint_steps: steps between checkpoints. evaluation_steps: steps between evaluations. seed: of weights, batches and rollouts.
    """

    family: str = "dflash"
    num_steps: int
    batch_size: int = 16
    num_anchors: int = 24
    weighting: str = "decay"
    decay: float = 7.0
    old_slots: int = 0
    emphasis: float = 3.0
    target_temperature: float = 1.0
    decoding_temperature: float = 0.0
    refresh_steps: int = 50
    num_recorded: int = 64
    optimizer: str = "adamw"
    learning_rate: float = 4e-3
    num_warmup: int = 50
    weight_decay: float = 0.01
    checkpoint_steps: int = 200
    evaluation_steps: int = 500
    seed: int = 0

    def __post_init__(self):
        for name in ("num_steps", "batch_size", "num_anchors", "checkpoint_steps", "evaluation_steps", "refresh_steps", "num_recorded"):
            if not (is_integer(getattr(self, name)) and 1 <= getattr(self, name) <= LARGEST):
                raise ValueError(f"{name} must be a whole number in 1..{LARGEST}; got {getattr(self, name)}.")
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {self.family!r}.")
        for name in ("num_warmup", "old_slots", "seed"):
            if not (is_integer(getattr(self, name)) and 0 <= getattr(self, name) <= LARGEST):
                raise ValueError(f"{name} must be a whole number in 0..{LARGEST}; got {getattr(self, name)}.")
        for name in ("decay", "weight_decay", "decoding_temperature"):
            if not (is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be 0 or more, and a number float32 can hold; got {getattr(self, name)}.")
        for name in ("learning_rate", "emphasis", "target_temperature"):
            if not is_positive(getattr(self, name)):
                raise ValueError(f"{name} must be more than 0, and a number float32 can hold; got {getattr(self, name)}.")
        if self.weighting not in _WEIGHTINGS:
            raise ValueError(f"weighting must be one of {', '.join(_WEIGHTINGS)}; got {self.weighting!r}.")
        if FAMILIES[self.family].is_on_policy and self.checkpoint_steps % self.refresh_steps:
            raise ValueError(
                f"checkpoint_steps ({self.checkpoint_steps}) must be a multiple of refresh_steps ({self.refresh_steps}): "
                "a resumed run records again with the weights of its checkpoint."
            )
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon; got {self.optimizer!r}.")


def init_drafter(config: DrafterConfig, target: Target, *, seed: int) -> Drafter:
    """A drafter with random weights and a final norm scaled to the target's head."""
    dtype = target.embedding.embedding[...].dtype
    drafter = Drafter(config, dtype=dtype, rngs=nnx.Rngs(seed))
    drafter.norm.scale[...] = _FINAL_NORM_SCALE * target.norm.scale[...]
    if drafter.causal_head is not None:
        drafter.causal_head.output.kernel[...] = jnp.zeros_like(drafter.causal_head.output.kernel[...])  # corrections begin at none
    if drafter.latent_mixture is not None:
        drafter.latent_mixture.up.kernel[...] *= _COMPONENT_SCALE
    if config.fusion == "per_layer":
        # each layer begins with a tap of about its own depth (AngelSpec)
        depth, tap = (np.linspace(0, 1, count) for count in drafter.mixture.shape)
        drafter.mixture[...] = jnp.asarray(-2.0 * (len(tap) - 1) * np.abs(tap[None] - depth[:, None]), dtype)
    return drafter


def warm_start(drafter: Drafter, start: Drafter) -> tuple[Drafter, list[str]]:
    """The drafter with every leaf of `start` that has the same path and shape, in the drafter's dtype; and the paths taken.

    Raises ValueError if none fits.
    """
    own, given = checkpoint.leaves(drafter), checkpoint.leaves(start)
    taken = {path: value.astype(own[path].dtype) for path, value in given.items() if path in own and own[path].shape == value.shape}
    if not taken:
        raise ValueError("no weight of the start fits this drafter; give it the same number of heads, widths and taps.")
    return checkpoint.with_leaves(drafter, {**own, **taken}), sorted(taken)


def train(
    drafter: Drafter,
    target: Target,
    rollouts: Rollouts,
    *,
    config: TrainConfig,
    out: Path,
    evaluate: Callable[[Drafter], Mapping[str, float]] | None = None,
    mesh: Mesh | None = None,
    show_progress: bool = True,
) -> Drafter:
    """Run (or resume) config.num_steps steps and return the trained drafter.

    out: folder for `checkpoints/`, `train_config.json` and `log.jsonl` (one line an evaluation). A run found there is resumed.
    evaluate: figures of a drafter, logged every evaluation_steps.
    mesh: of axes `data` and `model` (`placement`); None trains on one device. A run may be resumed on another mesh: sums are then taken in
        another order, and weights differ by rounding.
    Raises ValueError if `out` holds a run of another TrainConfig or no checkpoint that can be read, if the sequences leave no room for a
    block, for a drafter of another family or with a vocabulary of its own, for a mesh that the batch does not fill, and when a step's loss
    is no finite number.
    """
    family = FAMILIES[config.family]
    kind, has_mixture = None if drafter.config.head is None else drafter.config.head.kind, drafter.latent_mixture is not None
    is_of_family = kind in family.head_kinds and has_mixture == family.has_mixture and drafter.config.fusion == family.fusion
    if not is_of_family or (family.has_confidence and drafter.confidence is None):
        made = f"a drafter with head {kind}{' and a mixture' if has_mixture else ''}, taps fused {drafter.config.fusion},"
        raise ValueError(f"{made} is not of the family {config.family}; give the family it was made for.")
    if drafter.vocabulary is not None:
        raise ValueError(f"the drafter's head knows {drafter.config.draft_vocab_size} tokens only; one with all of them is trained.")
    length, block_size, longest = rollouts.tokens.shape[1], drafter.config.block_size, int(np.max(rollouts.starts))
    if length < block_size + 2 or longest > length - block_size:
        raise ValueError(
            f"sequences of {length} tokens, {longest} of them a prompt's, are too short for blocks of {block_size}; "
            "take longer sequences or shorter prompts."
        )
    if mesh is not None:
        check_batch(mesh, config.batch_size)
        target = place_weights(target, mesh)  # as it lies already where `make_drafter` has placed it
    out.mkdir(parents=True, exist_ok=True)
    pin_settings(out / "train_config.json", asdict(config))
    optimizer = _optimizer(config)
    weights = {name: jnp.copy(value) for name, value in checkpoint.leaves(drafter).items()}  # the caller's own would be donated
    # the smoothed loss is NaN before the first step
    state = {"weights": weights, "optimizer": optimizer.init(weights), "loss": jnp.float32(jnp.nan)}
    state = state if mesh is None else place_weights(state, mesh)

    @partial(jax.jit, donate_argnums=0)
    def update(state, target, batch, progress):
        def loss_of(weights):
            trained = checkpoint.with_leaves(drafter, weights)
            blocks = packed_blocks(trained, target, batch.tokens, batch.anchors)
            blocks = blocks._replace(target_logits=blocks.target_logits / config.target_temperature)
            if batch.proposals is not None:
                logits = proposed_logits(target, batch.tokens, batch.anchors, batch.proposals) / config.target_temperature
                blocks = blocks._replace(proposed=Proposed(batch.proposals, batch.num_accepted, logits))
            is_dynamic = config.weighting == "d-pace"
            decay = 0.0 if is_dynamic else config.decay
            of_slots = slot_weights(blocks.is_inside, decay=decay, emphasis=config.emphasis, old_slots=config.old_slots)
            if is_dynamic:
                of_slots = of_slots * reach_weights(cross_entropy(blocks.logits, blocks.tokens[:, :, 1:]), blocks.is_inside)
            scored = family.loss(trained, target, blocks, of_slots, progress)
            return scored.loss, hit_rates(scored.logits, blocks.tokens[:, :, 1:], blocks.is_inside)

        (loss, hits), gradients = jax.value_and_grad(loss_of, has_aux=True)(state["weights"])
        changes, optimizer_state = optimizer.update(gradients, state["optimizer"], state["weights"])
        smoothed = jnp.where(jnp.isnan(state["loss"]), loss, 0.98 * state["loss"] + 0.02 * loss)
        return {"weights": optax.apply_updates(state["weights"], changes), "optimizer": optimizer_state, "loss": smoothed}, loss, hits

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(out.absolute() / "checkpoints", options=options) as checkpoints:
        first, state = _restore(checkpoints, state)
        _keep_log(out / "log.jsonl", first)
        progress = tqdm(range(first, config.num_steps), initial=first, total=config.num_steps, unit="step", disable=not show_progress)
        if first:
            tqdm.write(f"resumed from the checkpoint of step {first}")
        recorded, told = None, {}
        for index in progress:
            if not family.is_on_policy:
                batch = draw_batch(rollouts, config=config, block_size=drafter.config.block_size, step=index)
            else:
                if recorded is None or index % config.refresh_steps == 0:
                    current = checkpoint.with_leaves(drafter, state["weights"])
                    recorded = _record(Models(target=target, drafter=current), rollouts, config=config, step=index)
                batch = draw_recorded(recorded, config=config, step=index)
            batch = jax.tree.map(jnp.asarray, batch) if mesh is None else place_rows(batch, mesh)
            state, loss, hits = update(state, target, batch, jnp.float32(index / config.num_steps))
            done, smoothed = index + 1, float(state["loss"])
            if not np.isfinite(float(loss)):
                raise ValueError(
                    f"the loss of step {done} is {float(loss)}; lower learning_rate, in another folder: a run keeps its settings."
                )
            progress.set_postfix({"loss": f"{smoothed:.3f}", "hit": f"{float(hits[0]):.2f}", **told}, refresh=False)
            if done % config.evaluation_steps == 0 or done == config.num_steps:
                record = {"step": done, "loss": smoothed, "hit_rates": np.asarray(hits).round(4).tolist()}
                record |= dict(evaluate(checkpoint.with_leaves(drafter, state["weights"]))) if evaluate else {}
                told = {"tau": f"{record['tau']:.2f}"} if "tau" in record else {}
                with (out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record) + "\n")
                tqdm.write(json.dumps({name: value for name, value in record.items() if name != "hit_rates"}))
            # after the log: what a checkpoint holds has been written down
            if done % config.checkpoint_steps == 0 or done == config.num_steps:
                checkpoints.save(done, args=ocp.args.StandardSave(state))
    return checkpoint.with_leaves(drafter, state["weights"])


def _restore(checkpoints: ocp.CheckpointManager, state: Any) -> tuple[int, Any]:
    """The newest checkpoint that can be read, with its step; those that cannot are removed. (0, state) if there is none."""
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    unread: dict[int, Exception] = {}
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            found = checkpoints.restore(step, args=ocp.args.StandardRestore(shapes))
        except Exception as error:  # whatever the layers below say of a file cut short
            unread[step] = error
            continue
        for newer, error in unread.items():  # only now: without an older one that can be read, nothing is removed
            tqdm.write(f"checkpoint {newer} cannot be read, so the one before it is used ({reprlib.repr(str(error))})")
            checkpoints.delete(newer)
        return step, found
    if unread:
        newest = max(unread)
        raise ValueError(
            f"no checkpoint of {checkpoints.directory} can be read (the newest: {reprlib.repr(str(unread[newest]))}); "
            "take the version that wrote it, or another folder."
        ) from unread[newest]
    return 0, state


def _keep_log(path: Path, step: int) -> None:
    """Remove the lines of steps that will be run again. Raises ValueError for a line that is none of a log."""
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        kept = [line for number, line in enumerate(lines, start=1) if line.endswith(b"\n") and _step_of(path, number, line) <= step]
        if kept != lines:
            write_bytes(path, b"".join(kept))


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
        if is_integer(step):
            return step
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ValueError(f"{path} line {number} is not a line of a training log; remove that line, nothing else is lost.")


def draw_batch(rollouts: Rollouts, *, config: TrainConfig, block_size: int, step: int) -> Batch:
    """What one step learns from; anchors lie in the target's own text and leave a block's room."""
    rng = np.random.default_rng((config.seed, step))
    chosen = rng.integers(len(rollouts.tokens), size=config.batch_size)
    tokens = rollouts.tokens[chosen].astype(np.int32)
    last, first = tokens.shape[1] - block_size, rollouts.starts[chosen]
    anchors = first[:, None] + (rng.random((config.batch_size, config.num_anchors)) * (last - first + 1)[:, None]).astype(np.int32)
    return Batch(tokens=tokens, anchors=anchors.astype(np.int32))


def draw_recorded(recorded: Recorded, *, config: TrainConfig, step: int) -> Batch:
    """What one step learns from: blocks that were drafted, with what became of them."""
    rng = np.random.default_rng((config.seed, step))
    rows = rng.integers(len(recorded.tokens), size=config.batch_size)[:, None]
    blocks = (rng.random((config.batch_size, config.num_anchors)) * recorded.num_blocks[rows]).astype(np.int64)
    return Batch(
        tokens=recorded.tokens[rows[:, 0]],
        anchors=recorded.anchors[rows, blocks],
        proposals=recorded.proposals[rows, blocks],
        num_accepted=recorded.num_accepted[rows, blocks],
    )


def _record(models: Models, rollouts: Rollouts, *, config: TrainConfig, step: int) -> Recorded:
    """Blocks the drafter drafts now, behind beginnings drawn for this step."""
    chosen = np.random.default_rng((config.seed, step, 1)).integers(len(rollouts.tokens), size=config.num_recorded)
    return record_blocks(
        models,
        rollouts.tokens[chosen].astype(np.int32),
        rollouts.starts[chosen],
        temperature=config.decoding_temperature,
        key=jax.random.fold_in(jax.random.key(config.seed), step),
    )


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
        return optax.contrib.MuonDimensionNumbers(0, 2) if path.endswith(("/gate_up/kernel", "/up/kernel")) else None

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
