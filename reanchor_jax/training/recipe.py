"""Make a drafter for a target from texts, in one resumable go: rollouts, training, evaluation, a drafter directory.

In: a target, texts, what to sample, the drafter's shape, how to train.
Out: a folder with `recipe.json`, `rollouts.npz`, what `train` writes and, at the end, `drafter/`.
Source: DFlash (arXiv 2602.06036). The last texts are held out: no sequence begins from them, and tau is measured on them by decoding.
"""

import dataclasses
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from reanchor_jax import checkpoint, huggingface
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.loop import generate
from reanchor_jax.decoding.sampling import make_sampling
from reanchor_jax.files import check_vacant
from reanchor_jax.models.drafter import Drafter, Models
from reanchor_jax.models.target import Target
from reanchor_jax.statistics import summarize
from reanchor_jax.text import pad_prompts, pin_settings
from reanchor_jax.training.calibration import calibrate
from reanchor_jax.training.placement import check_batch, place_weights
from reanchor_jax.training.rollouts import SHORTEST_PROMPT, Rollouts, mixed_rollouts
from reanchor_jax.training.shape import DrafterShape
from reanchor_jax.training.trainer import TrainConfig, init_drafter, train, warm_start

_SHORTEST_PART = 80  # characters; a text's last paragraphs, if shorter, begin nothing worth continuing
_EVALUATED_PROMPT, _EVALUATED_NEW = 32, 100  # tokens of a held-out text that are given, and that are decoded


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What the target samples for the drafter to learn from.

    num_sequences: sequences. sequence_length: tokens of each. longest_prompt: tokens of a text's beginning, at most.
    own_prefix_rate: fraction that begins with text of the target's own. sampled_rate: fraction sampled at temperature 1, the rest greedy.
    num_held_out: texts at the end of the file kept for evaluation.
    is_chat: texts are wrapped as a user's messages by the tokenizer's chat template and answered; otherwise beginnings of them are
        continued. Messages of more tokens than longest_prompt are left out, and no sequence begins with the target's own text. Answers are
        not stopped at end tokens: the target writes on to the sequence's end.
    """

    num_sequences: int = 4096
    sequence_length: int = 224
    longest_prompt: int = 64
    own_prefix_rate: float = 0.2
    sampled_rate: float = 0.15
    num_held_out: int = 20
    is_chat: bool = False

    def __post_init__(self):
        for name in ("num_sequences", "num_held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not SHORTEST_PROMPT <= self.longest_prompt < self.sequence_length:
            raise ValueError(
                f"longest_prompt ({self.longest_prompt}) must be at least {SHORTEST_PROMPT} and less than sequence_length "
                f"({self.sequence_length})."
            )
        for name in ("own_prefix_rate", "sampled_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1]; got {getattr(self, name)}.")


def make_drafter(
    target: Target,
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    *,
    rollout_config: RolloutConfig,
    shape: DrafterShape,
    config: TrainConfig,
    out: Path,
    sources: Mapping[str, Any],
    start: Drafter | None = None,
    mesh: Mesh | None = None,
    show_progress: bool = True,
) -> Path:
    """Run or resume the whole recipe in `out`; return the drafter's directory.

    sources: what to say in the provenance about where target, texts and start come from.
    start: a trained drafter whose weights are taken over where they fit (`warm_start`). mesh: as `train` takes it.
    Raises ValueError if `out` holds a run of other settings, for a sequence_length that does not fit, or for texts too few or too short.
    """
    drafter_config = shape.huggingface(target.config, config.family)
    length, limit = rollout_config.sequence_length, target.config.max_positions
    parsed = huggingface.read_drafter(drafter_config)
    if not parsed.block_size + 2 <= length <= limit:
        raise ValueError(
            f"sequence_length ({length}) must lie in {parsed.block_size + 2}..{limit}: "
            "a block and two tokens at least, at most the positions the target was made for."
        )
    if rollout_config.longest_prompt > length - parsed.block_size:
        raise ValueError(
            f"longest_prompt ({rollout_config.longest_prompt}) must leave room for a block of {parsed.block_size} in sequence_length "
            f"({length}): at most {length - parsed.block_size}."
        )
    if len(texts) <= rollout_config.num_held_out:
        raise ValueError(f"{len(texts)} texts leave none to train on after {rollout_config.num_held_out} held out; give more texts.")
    if mesh is not None:
        check_batch(mesh, config.batch_size)
        target = place_weights(target, mesh)
    encoded = _encoded(texts, encode, vocab_size=target.config.vocab_size)
    known, held_out = encoded[: -rollout_config.num_held_out], _evaluated(encoded[-rollout_config.num_held_out :], rollout_config)
    _check_usable(known, rollout_config)
    evaluate = tau_of(target, held_out, temperature=config.decoding_temperature)
    if parsed.confidence is not None and max(map(len, held_out)) + 3 * parsed.block_size > limit:
        raise ValueError(
            f"held-out texts of {max(map(len, held_out))} tokens leave too little of {limit} positions to calibrate on; "
            "lower longest_prompt."
        )
    sampling = {
        **dataclasses.asdict(rollout_config),
        "seed": config.seed,
        "texts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
        "target_sha256": _fingerprint(target),
    }
    sources = dict(sources) | ({} if start is None else {"start_sha256": _fingerprint(start)})
    recipe = {"sources": sources, "rollouts": sampling, "drafter": drafter_config, "training": dataclasses.asdict(config)}
    drafter, taken = init_drafter(parsed, target, seed=config.seed), []
    if start is not None:
        drafter, taken = warm_start(drafter, start)
        if new := sorted(checkpoint.leaves(drafter).keys() - taken):
            tqdm.write(f"{len(taken)} weights are the start's; new are {', '.join(new)}")
    out.mkdir(parents=True, exist_ok=True)
    check_vacant(out / "drafter", foreign_entry=checkpoint.foreign_entry)
    if (out / "checkpoints").exists() and not (out / "checkpoints").is_dir():
        raise FileExistsError(f"{out / 'checkpoints'} is no folder; remove it or choose another --out.")
    pin_settings(out / "recipe.json", recipe)
    rollouts = _load_rollouts(out / "rollouts.npz", sampling)
    if rollouts is None:
        own = texts[: -rollout_config.num_held_out]
        parts = [] if rollout_config.is_chat else [encode(part) for text in own for part in later_parts(text)]
        rollouts = mixed_rollouts(
            target,
            [*known, *known, *parts],  # a text's own beginning counts twice
            count=rollout_config.num_sequences,
            length=rollout_config.sequence_length,
            longest_prompt=rollout_config.longest_prompt,
            own_prefix_rate=rollout_config.own_prefix_rate,
            sampled_rate=rollout_config.sampled_rate,
            seed=config.seed,
            is_whole=rollout_config.is_chat,
            show_progress=show_progress,
        )
        _save_rollouts(out / "rollouts.npz", rollouts, sampling, vocab_size=target.config.vocab_size)
    drafter = train(drafter, target, rollouts, config=config, out=out, evaluate=evaluate, mesh=mesh, show_progress=show_progress)
    provenance: dict[str, Any] = {**recipe, "taken_from_start": taken, "evaluation": dict(evaluate(drafter))}
    if drafter.confidence is not None:
        models = Models(target=target, drafter=drafter)
        drafter, drafter_config, provenance["calibration"] = _calibrated(
            models, drafter_config, held_out, temperature=config.decoding_temperature
        )
    provenance = {"drafter": provenance}
    return checkpoint.save_drafter(out / "drafter", drafter, drafter_config=drafter_config, provenance=provenance, overwrite=True)


def _calibrated(
    models: Models, drafter_config: dict[str, Any], prompts: Sequence[Sequence[int]], *, temperature: float
) -> tuple[Drafter, dict[str, Any], dict[str, Any]]:
    """The drafter and its config with confidences calibrated on what follows held-out prompts; and what that did."""
    tokens, lengths = pad_prompts(prompts)
    room = min(_EVALUATED_NEW, models.target.config.max_positions - tokens.shape[1])
    found = calibrate(models, np.pad(tokens, ((0, 0), (0, room))), lengths, temperature=temperature)
    own = {**drafter_config["dflash_config"], "confidence_temperatures": found.temperatures.tolist()}
    drafter_config = {**drafter_config, "dflash_config": own}
    assert models.drafter is not None
    weights = checkpoint.leaves(models.drafter)
    empty = checkpoint.build_drafter(huggingface.read_drafter(drafter_config), jnp.float32)
    told = {"num_blocks": found.num_blocks, "error_before": found.error_before.round(4).tolist()}
    return checkpoint.with_leaves(empty, weights), drafter_config, {**told, "error_after": found.error_after.round(4).tolist()}


def later_parts(text: str) -> list[str]:
    """What a text says from its second, third, ... paragraph on, as far as it is long enough to begin a sequence."""
    paragraphs = text.split("\n\n")
    parts = ["\n\n".join(paragraphs[index:]) for index in range(1, len(paragraphs))]
    return [part.strip() for part in parts if len(part) > _SHORTEST_PART]


def tau_of(target: Target, prompts: Sequence[Sequence[int]], *, temperature: float = 0.0) -> Callable[[Drafter], dict[str, float]]:
    """A function that measures a drafter's DFlash tau behind prompts by decoding at a temperature, always with the same key."""
    tokens, lengths = pad_prompts(prompts)
    num_new = min(_EVALUATED_NEW, target.config.max_positions - tokens.shape[1])

    def evaluate(drafter: Drafter) -> dict[str, float]:
        result = generate(
            Models(target=target, drafter=drafter),
            tokens,
            lengths,
            jax.random.key(0),
            config=DecodeConfig.dflash(cache_length=tokens.shape[1] + num_new),
            sampling=make_sampling(len(tokens), temperature=temperature),
            max_new_tokens=num_new,
        )
        summary = summarize([result.info], block_size=drafter.config.block_size)
        return {"tau": round(summary.tau, 4), "tau_standard_error": round(summary.tau_standard_error, 4)}

    return evaluate


def _encoded(texts: Sequence[str], encode: Callable[[str], list[int]], *, vocab_size: int) -> list[list[int]]:
    """Token ids of every text. Raises ValueError, naming the text by its place from 1 on, if it cannot be read or knows more tokens."""
    encoded = []
    for place, text in enumerate(texts, start=1):
        try:
            ids = encode(text)
        except ValueError as error:
            raise ValueError(f"text {place}: {error}") from error
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            raise ValueError(
                f"text {place} holds token id {wrong[0]}, outside the target's vocabulary 0..{vocab_size - 1}; "
                "the tokenizer is another model's, or has tokens added."
            )
        encoded.append(ids)
    return encoded


def _check_usable(texts: Sequence[Sequence[int]], config: RolloutConfig) -> None:
    """Raise ValueError unless some text can begin a sequence."""
    least, most = SHORTEST_PROMPT, config.longest_prompt
    if not any(len(text) >= least and (not config.is_chat or len(text) <= most) for text in texts):
        rule = f"{least}..{most} tokens; raise longest_prompt" if config.is_chat else f"{least} tokens or more; give longer texts"
        raise ValueError(f"no text to train on has {rule}.")


def _evaluated(texts: Sequence[Sequence[int]], config: RolloutConfig) -> list[list[int]]:
    """What is decoded from held-out texts: beginnings of 32 tokens, or whole messages. Raises ValueError if no text is fit for it."""
    if config.is_chat:
        prompts, rule = [list(text) for text in texts if len(text) <= config.longest_prompt], f"{config.longest_prompt} tokens or fewer"
    else:
        prompts = [list(text[:_EVALUATED_PROMPT]) for text in texts if len(text) >= _EVALUATED_PROMPT]
        rule = f"{_EVALUATED_PROMPT} tokens or more"
    if not prompts:
        raise ValueError(f"no held-out text has {rule}; let the prompts file end with such texts.")
    return prompts


def _fingerprint(module: Target | Drafter) -> str:
    digest = hashlib.sha256()
    for name, value in checkpoint.leaves(module).items():
        digest.update(name.encode() + np.asarray(value).tobytes())
    return digest.hexdigest()


def _save_rollouts(path: Path, rollouts: Rollouts, settings: Mapping[str, Any], *, vocab_size: int) -> None:
    dtype = np.int16 if vocab_size <= np.iinfo(np.int16).max else np.int32
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        np.savez(file, tokens=rollouts.tokens.astype(dtype), starts=rollouts.starts, settings=json.dumps(settings))
    os.replace(temporary, path)


def _load_rollouts(path: Path, settings: Mapping[str, Any]) -> Rollouts | None:
    """The stored rollouts if there are any of these settings, else None."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file) as stored:
            if json.loads(str(stored["settings"])) != dict(settings):
                return None
            return Rollouts(tokens=stored["tokens"], starts=stored["starts"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it to sample again.") from error
