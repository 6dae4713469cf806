"""Measure what rounds of every kind cost and bring on this machine, and keep it in a file.

In: Models, prompts as token ids; or a profile's JSON file.
Out: Profile, and the Schedule it makes for a number of rows.
Source: ours. Rounds are timed whole, in a compiled loop like a generation's, on states whose length is set; what they bring is measured on
    the prompts.
"""

import hashlib
import itertools
import json
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from tqdm import tqdm

from reanchor_jax.bench.compare import environment
from reanchor_jax.bench.methods import Request, begin
from reanchor_jax.bench.passes import difference, fastest
from reanchor_jax.config import CACHE_CHUNK
from reanchor_jax.decoding.config import Arm, DecodeConfig, Schedule
from reanchor_jax.decoding.loop import step
from reanchor_jax.decoding.schedule import OPTIMISM, Acceptance, pick_arm
from reanchor_jax.decoding.state import DecodeState, round_up
from reanchor_jax.decoding.walk import RUNNING
from reanchor_jax.fields import LARGEST, is_integer, is_number
from reanchor_jax.files import read_json
from reanchor_jax.models.drafter import Models
from reanchor_jax.text import write_text

_FORMAT = 1
_TEMPERATURES = (0.0, 1.0)  # at which arms are measured
_TIMED_ROUNDS = (4, 12)  # of a short and a long run, whose difference counts
_NEW_TOKENS = 128  # a prompt, to measure what an arm brings
_SAMPLED = (1e-6, 0.25, 0.5, 0.75, 1.0)  # temperatures at which arms are compared; the first stands for greedy rows beside a sampled one
_NUM_FACTORS = 41  # steps from a text that accepts nothing to the easiest one
_STEPS = 8  # contexts looked at from one that was measured to the next
_MANY = 1e12  # drafts seen, so many that only what was accepted of them counts
_UNMEASURED = Arm(num_blocks=0, num_nodes=1, seconds=((1.0,), (1.0,)), tokens=(1.0, 1.0))  # stands for figures that are not known yet


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What a profile measures.

    rows: numbers of rows decoded together; between them costs are interpolated, and a single one stands for all.
    contexts: committed tokens, best in the middle of a cache chunk of 64, since time grows by steps of one; those that the target cannot
        hold are left out.
    nodes: sizes of tries; those that do not hold the drafter's block are left out, and its plain chain is measured too.
    num_examples: prompts that are decoded, the first ones; 128 tokens each, past a stop token too.
    """

    rows: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (96, 480, 2016)
    nodes: tuple[int, ...] = (16, 32, 64)
    num_examples: int = 16

    def __post_init__(self):
        for name, least in (("rows", 1), ("contexts", 1), ("nodes", 2)):
            values = getattr(self, name)
            is_typed = isinstance(values, tuple) and all(is_integer(value) and least <= value <= LARGEST for value in values)
            if not is_typed or not values or list(values) != sorted(set(values)):
                raise ValueError(f"{name} must be strictly rising whole numbers of at least {least}; got {values!r}.")
        if not is_integer(self.num_examples) or self.num_examples < 2:
            raise ValueError(f"num_examples must be a whole number of at least 2, to see how prompts differ; got {self.num_examples!r}.")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of this machine for one pair of models.

    key: device, cores, versions, models and dtype it holds for. rows, contexts: as in ProfileConfig.
    arms: for each number of rows, the arms with their figures; the same arms in each. spread: as in Schedule.
    """

    key: dict[str, Any]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    arms: tuple[tuple[Arm, ...], ...]
    spread: float

    def __post_init__(self):
        ProfileConfig(rows=self.rows, contexts=self.contexts)
        if not isinstance(self.arms, tuple) or len(self.arms) != len(self.rows):
            raise ValueError(f"arms must be a tuple for each of the {len(self.rows)} numbers of rows; got {reprlib.repr(self.arms)}.")
        for each in self.arms:
            Schedule(arms=each, contexts=self.contexts, spread=self.spread)
        kinds = [[arm.kind for arm in each] for each in self.arms]
        if any(each != kinds[0] for each in kinds) or not any(arm.is_chain for arm in self.arms[0]):
            raise ValueError(f"every number of rows needs the same arms, the chain among them; got {reprlib.repr(kinds)}.")

    def schedule(self, num_rows: int, temperature: float | None = None) -> Schedule:
        """The arms worth compiling for that many rows.

        Their seconds are interpolated between the numbers of rows measured, and extrapolated beyond the largest; a single number stands for
        all.
        temperature: of the rows; None means any. Kept are arms that are picked in some context for some text, where many tokens remain. The
        easiest text accepts as many drafts more than the measured as a generation begins by hoping for. If plain decoding alone is kept,
        nothing is drafted.
        """
        if not is_integer(num_rows) or not 1 <= num_rows <= LARGEST:
            raise ValueError(f"num_rows must be a whole number of at least 1, and below 2^31; got {reprlib.repr(num_rows)}.")
        if temperature is not None and not (is_number(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be a number of at least 0, or None for any; got {temperature!r}.")
        # [arms, temperatures, contexts]
        seconds = _at(self.rows, np.asarray([[arm.seconds for arm in arms] for arms in self.arms]), num_rows)
        kinds = tuple(replace(arm, seconds=tuple(map(tuple, mine.tolist()))) for arm, mine in zip(self.arms[0], seconds, strict=True))
        whole = Schedule(arms=kinds, contexts=self.contexts, spread=self.spread)
        temperatures = (0.0, *_SAMPLED) if temperature is None else (temperature,)
        best = set(np.unique(_picked(whole, temperatures)).tolist())
        if any(kinds[index].num_blocks for index in best) and not any(kinds[index].num_blocks == 1 for index in best):
            best.add(next(index for index, arm in enumerate(kinds) if arm.is_chain))
        return replace(whole, arms=tuple(kinds[index] for index in sorted(best)))


def measure_profile(models: Models, prompts: Sequence[Sequence[int]], *, config: ProfileConfig, show_progress: bool = True) -> Profile:
    """Time every arm and decode the prompts with it; minutes, most of them compiling.

    Raises ValueError without a drafter, if no nodes hold its blocks, for fewer than two prompts, and for prompts that the target
    cannot hold.
    """
    if models.drafter is None:
        raise ValueError("a profile compares drafting with plain decoding, so it needs a drafter; give a pair.")
    prompts = list(prompts[: config.num_examples])
    if len(prompts) < 2:
        raise ValueError(f"a profile needs at least 2 prompts, to see how they differ; got {len(prompts)}.")
    block_size = models.drafter.config.block_size
    nodes = tuple(size for size in config.nodes if size >= block_size)
    if not nodes:
        raise ValueError(f"nodes must hold the drafter's blocks of {block_size} tokens; got {config.nodes}; give larger ones.")
    limit = models.target.config.max_positions
    longest = max(map(len, prompts)) + _NEW_TOKENS
    if longest > limit:
        raise ValueError(f"a prompt and {_NEW_TOKENS} new tokens must fit the {limit} positions of the target; got {longest}; shorten it.")
    contexts = tuple(context for context in config.contexts if context <= limit) or (limit,)
    cache_length = min(round_up(max(longest, *contexts), CACHE_CHUNK), limit)
    kinds = _arms(block_size, nodes)
    # every arm runs on the arrays of the largest, as it will beside it
    whole = DecodeConfig.scheduled(Schedule(arms=tuple(kinds), contexts=(0,), spread=1.0), cache_length=cache_length)
    seconds, tokens, taus = {}, {}, []
    with tqdm(total=len(config.rows) * len(_TEMPERATURES) * len(kinds), unit="arm", disable=not show_progress, leave=False) as progress:
        for rows, temperature in itertools.product(config.rows, _TEMPERATURES):
            request = Request(max_new_tokens=_NEW_TOKENS, temperature=temperature, batch_size=rows)
            state, _ = begin(models, prompts, [0] * rows, config=whole, request=request)
            for kind in kinds:
                progress.set_description(f"{rows} rows, {kind.num_blocks} blocks, {kind.num_nodes} nodes")
                forced = replace(whole, schedule=_only(kind, kinds))
                seconds[rows, temperature, kind] = tuple(_pass_seconds(models, state, context, forced) for context in contexts)
                if rows == config.rows[-1]:  # most rows take the fewest passes; what an arm brings is nearly the same for any number
                    emitted, passes = _tokens(models, prompts, whole, forced, request=request)
                    tokens[temperature, kind] = max(float(emitted.sum() / passes.sum()), 1.0)
                    if kind.is_chain and not temperature:
                        taus = emitted / passes
                progress.update()

    def measured(rows: int, kind: Arm) -> Arm:
        return replace(
            kind,
            seconds=tuple(seconds[rows, temperature, kind] for temperature in _TEMPERATURES),
            tokens=tuple(tokens[temperature, kind] for temperature in _TEMPERATURES),
        )

    return Profile(
        key=profile_key(models),
        rows=config.rows,
        contexts=contexts,
        arms=tuple(tuple(measured(rows, kind) for kind in kinds) for rows in config.rows),
        spread=_spread(np.asarray(taus)),
    )


def profile_key(models: Models) -> dict[str, Any]:
    """What a profile holds for: device, cores, versions, and the shapes of both models with their dtype."""
    surroundings = environment(models)
    shapes = repr((models.target.config, None if models.drafter is None else models.drafter.config))
    kept = {name: surroundings[name] for name in ("device", "cores", "dtype", "versions")}
    return {**kept, "models": hashlib.sha256(shapes.encode()).hexdigest()[:16]}


def write_profile(path: Path | str, profile: Profile) -> None:
    """Write a profile as JSON; the file appears whole."""
    write_text(path, json.dumps({"format": _FORMAT, **asdict(profile)}, indent=1) + "\n")


def read_profile(path: Path | str, models: Models) -> Profile:
    """Read a profile for these models on this machine.

    Raises FileNotFoundError or IsADirectoryError; ValueError for what is no profile, for one of another device, number of cores, version,
    dtype or pair, and without a drafter.
    """
    path = Path(path)
    if models.drafter is None:
        raise ValueError(f"{path}: a profile compares drafting with plain decoding, and these models have no drafter; give a pair.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the file that `reanchor-jax profile` wrote.")
    found = read_json(path)
    if found is None:
        raise FileNotFoundError(f"{path} does not exist; measure a profile with `reanchor-jax profile`.")
    try:
        profile = _read(found)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path} is no profile that can be used: {reason}; measure it again with `reanchor-jax profile`.") from error
    wanted = profile_key(models)
    for name, value in wanted.items():
        if profile.key.get(name) != value:
            raise ValueError(
                f"{path} was measured with {name} {profile.key.get(name)}, here it is {value}; "
                "costs do not carry over, measure them again with `reanchor-jax profile`."
            )
    try:
        DecodeConfig.scheduled(Schedule(arms=profile.arms[0], contexts=profile.contexts, spread=profile.spread)).resolve(
            models.drafter.config.block_size
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return profile


def _read(found: dict[str, Any]) -> Profile:
    """Build the Profile of a record. Raises ValueError telling what is wrong with it."""
    number = found.get("format")
    if type(number) is not int or number != _FORMAT:
        raise ValueError(f"its format is {number!r}, this version reads {_FORMAT}")
    for name, wanted in (("key", "an object"), ("rows", "a list"), ("contexts", "a list"), ("arms", "a list"), ("spread", "a number")):
        value = found.get(name)
        if not {"an object": isinstance(value, dict), "a list": isinstance(value, list), "a number": is_number(value)}[wanted]:
            raise ValueError(f"{name} must be {wanted}; got {reprlib.repr(value)}")
    names = {field.name for field in fields(Arm)}
    for arms in found["arms"]:
        if not isinstance(arms, list) or not all(isinstance(arm, dict) and arm.keys() == names for arm in arms):
            raise ValueError(f"arms must be lists, one a number of rows, of objects of {', '.join(sorted(names))}")
    arms = []
    for each in found["arms"]:
        arms.append([])
        for number, arm in enumerate(each):
            read = arm | {"tokens": _as_tuple(arm["tokens"]), "seconds": _as_tuple(arm["seconds"], num_levels=2)}
            try:
                arms[-1].append(Arm(**read))
            except ValueError as error:
                raise ValueError(f"arm {number}: {error}") from error
    return Profile(
        key=found["key"],
        rows=tuple(found["rows"]),
        contexts=tuple(found["contexts"]),
        arms=tuple(map(tuple, arms)),
        spread=found["spread"],
    )


def _as_tuple(value: Any, *, num_levels: int = 1) -> Any:
    """JSON's lists, nested so deep at most, as the tuples of a record."""
    if not isinstance(value, list):
        return value
    return tuple(value if num_levels == 1 else (_as_tuple(inner, num_levels=num_levels - 1) for inner in value))


def _picked(schedule: Schedule, temperatures: Sequence[float]) -> np.ndarray:
    """Arms that `pick_arm` takes for a row of each temperature, in all kinds of texts and contexts, with and without retained states."""
    places = np.linspace(0, len(schedule.contexts) - 1, _STEPS * (len(schedule.contexts) - 1) + 1)
    contexts = np.interp(places, range(len(schedule.contexts)), schedule.contexts).astype(np.int32)
    factors = np.linspace(0, 1 + OPTIMISM * schedule.spread, _NUM_FACTORS)
    grid = np.meshgrid(factors, np.asarray(temperatures, np.float32), contexts, [0, 1], indexing="ij")

    def pick(factor, temperature, context, num_retained):
        one = jnp.ones((1,), jnp.int32)
        return pick_arm(
            schedule,
            Acceptance(accepted=factor[None] * _MANY, promised=jnp.full((1,), _MANY, jnp.float32)),
            temperature=temperature[None],
            lengths=context * one,
            remaining=LARGEST * one,
            num_retained=num_retained * one,
            num_unread=0 * one,
            num_places=1,
            is_running=one > 0,
        )

    factor, temperature, context, num_retained = (values.ravel() for values in grid)
    return np.asarray(
        jax.jit(jax.vmap(pick))(
            jnp.asarray(factor, jnp.float32),
            jnp.asarray(temperature, jnp.float32),
            jnp.asarray(context, jnp.int32),
            jnp.asarray(num_retained, jnp.int32),
        )
    )


def _arms(block_size: int, nodes: Sequence[int]) -> list[Arm]:
    """Plain decoding, the chain, trees of one block, and trees of a quarter and of half a block of offsets where the chain leaves room."""
    offsets = sorted({max(block_size // 4, 1), max(block_size // 2, 1)})
    kinds = [(0, 1, False), (1, block_size, True), *((1, size, False) for size in nodes)]
    kinds += [(1 + count, size, False) for size in nodes if size >= 2 * block_size for count in offsets]
    return [replace(_UNMEASURED, num_blocks=blocks, num_nodes=size, is_chain=is_chain) for blocks, size, is_chain in kinds]


def _only(kind: Arm, kinds: Sequence[Arm]) -> Schedule:
    """A schedule that takes this arm whenever it can: all bring the same in the same time, and the first of equals is taken."""
    other = next(arm for arm in kinds if arm.num_blocks == 1)
    return Schedule(arms=(kind,) if kind.num_blocks == 1 else (kind, other), contexts=(0,), spread=1.0)


def _pass_seconds(models: Models, state: DecodeState, context: int, config: DecodeConfig) -> float:
    """Seconds of a pass at so many committed tokens."""
    held = state._replace(lengths=jnp.full_like(state.lengths, context))

    def timed(num_rounds: int) -> tuple[float, int]:
        seconds, (_, (_, passes)) = fastest(
            lambda given: _run(models, given, jnp.int32(num_rounds), jnp.bool_(True), config=config), lambda: jax.tree.map(jnp.copy, held)
        )
        return seconds, int(np.max(passes))

    return difference(*map(timed, _TIMED_ROUNDS))


def _tokens(
    models: Models, prompts: Sequence[Sequence[int]], whole: DecodeConfig, forced: DecodeConfig, *, request: Request
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and target passes of every prompt."""
    sums = []
    for first in range(0, len(prompts), request.batch_size):
        indices = range(first, min(first + request.batch_size, len(prompts)))
        state, _ = begin(models, prompts, indices, config=whole, request=request)
        _, pair = _run(models, state, jnp.int32(_NEW_TOKENS), jnp.bool_(False), config=forced)
        sums.append(np.asarray(pair)[:, : len(indices)])
    emitted, passes = np.concatenate(sums, axis=1)
    return emitted, passes


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def _run(
    models: Models, state: DecodeState, limit: Int[Array, ""], is_held: Bool[Array, ""], *, config: DecodeConfig
) -> tuple[DecodeState, tuple[Int[Array, " B"], Int[Array, " B"]]]:
    """Tokens emitted and target passes of every row, over so many rounds or until all rows have ended. The state given is used up.

    is_held: every round begins anew at the lengths given, with as many states to draft from as there can be.
    """
    none = jnp.zeros_like(state.lengths)
    full = jnp.full_like(none, state.retained.tokens.shape[1])

    def hold(new: DecodeState) -> DecodeState:
        return new._replace(
            lengths=jnp.where(is_held, state.lengths, new.lengths),
            remaining=jnp.where(is_held, config.cache_length, new.remaining),
            finish=jnp.where(is_held, RUNNING, new.finish),
            retained=new.retained._replace(counts=jnp.where(is_held, full, new.retained.counts)),
            backlog=new.backlog._replace(num_read=jnp.where(is_held, state.lengths, new.backlog.num_read)),
        )

    def is_left(carry):
        index, state, _, _ = carry
        return (index < limit) & jnp.any(state.finish == RUNNING)

    def advance(carry):
        index, state, emitted, passes = carry
        state, info = step(models, state, config=config)
        drafted = ((info.num_emitted > 0) & (info.num_plain == 0)).astype(jnp.int32)
        return index + 1, hold(state), emitted + info.num_emitted, passes + info.num_plain + drafted

    _, state, emitted, passes = jax.lax.while_loop(is_left, advance, (jnp.int32(0), hold(state), none, none))
    return state, (emitted, passes)


def _spread(taus: np.ndarray) -> float:
    """Standard deviation of accepted drafts over prompts, beside their mean; bounded, for prompts that tell nothing."""
    drafts = taus - 1
    mean = float(drafts.mean())
    return float(np.clip(drafts.std(ddof=1) / mean, 0.05, 2.0)) if mean > 0 else 1.0


def _at(points: Sequence[int], values: np.ndarray, x: int) -> np.ndarray:
    """Values along their first axis at x: linear between points and beyond the last, constant before the first or if it is the only one."""
    if len(points) == 1 or x <= points[0]:
        return values[0]
    index = int(np.clip(np.searchsorted(points, x) - 1, 0, len(points) - 2))
    share = (x - points[index]) / (points[index + 1] - points[index])
    found = values[index] + share * (values[index + 1] - values[index])
    return np.maximum(found, values[-1]) if x > points[-1] else found  # more rows never cost less
