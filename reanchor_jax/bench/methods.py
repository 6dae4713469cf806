"""Methods by name, and running prompts through one: prefill, rounds, or one prompt round by round.

In: Models, prompts as token ids, a Request, a method's DecodeConfig.
Out: Outcomes on the host, a prompt each; or the tokens of each round as they come.
Source: the presets of DecodeConfig. A prompt's key is folded from the seed and its index, so a batch size changes no output.
"""

import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import CACHE_CHUNK
from reanchor_jax.decoding.config import DRAFT_CHOICES, RETAIN_POLICIES, DecodeConfig, DraftChoice, Schedule
from reanchor_jax.decoding.loop import prefill, step
from reanchor_jax.decoding.sampling import Sampling, make_sampling
from reanchor_jax.decoding.state import FINISH_REASONS, DecodeState, round_up
from reanchor_jax.decoding.walk import RUNNING
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import ROUND_FIELDS, Emitted, StepInfo, per_pass
from reanchor_jax.text import pad_prompts

# the paper's ReAnchor retains baseline states; the other policies are methods of their own
_RETAINING = tuple(f"reanchor-{name}" for name in RETAIN_POLICIES if name not in ("none", "baseline"))
SCHEDULED = "scheduled"
METHODS = ("autoregressive", "dflash", "reanchor", *_RETAINING, "ddtree", "reanchor-tree", SCHEDULED)
# what a method's name may set behind a colon
OPTIONS = ("retain", "attach", "is_second_tried", "extent", "reliability", "num_ranks", "max_offsets", "num_nodes", "draft_choice")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of every method alike.

    retain: states the method `reanchor` reuses; None: the paper's.
    num_nodes: trie nodes of every method but the plain chain; None: as its config has it.
    cache_length: tokens a row can hold; None: what the longest prompt needs.
    batch_size: prompts decoded together.
    schedule: of the method `scheduled`, for that batch size (`bench.profiles`).
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    draft_choice: DraftChoice = DecodeConfig.draft_choice
    retain: str | None = None
    num_nodes: int | None = None
    cache_length: int | None = None
    batch_size: int = 1
    schedule: Schedule | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in 0..2^32-1; got {self.seed}.")
        if self.draft_choice not in DRAFT_CHOICES:
            raise ValueError(f"draft_choice must be one of {', '.join(DRAFT_CHOICES)}; got {self.draft_choice!r}.")
        make_sampling(1, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    def sampling(self, num_rows: int) -> Sampling:
        """The same sampling for each of num_rows rows."""
        return make_sampling(num_rows, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


class Outcome(NamedTuple):
    """What became of one prompt. rounds: the StepInfo fields of its rounds, a list each."""

    tokens: list[int]
    finish_reason: str
    rounds: dict[str, list[int]]


def temperature_name(temperature: float) -> str:
    """0, 0.7, 1, ...: different numbers have different names."""
    short = f"{temperature + 0.0:g}"  # + 0.0: -0 is 0
    return short if float(short) == temperature else repr(temperature)


def split_names(text: str) -> list[str]:
    """The names of a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def method_config(name: str, models: Models, prompts: Sequence[Sequence[int]], *, request: Request) -> DecodeConfig:
    """Config of a method for these models and prompts.

    name: one of METHODS, and behind colons fields of DecodeConfig (OPTIONS) to set: `reanchor:attach=random:extent=in_block`.
    Raises ValueError for an unknown name or option, a missing drafter, a prompt too long for its cache.
    """
    base, *given = name.split(":")
    if base not in METHODS:
        raise ValueError(f"unknown method {base!r}; methods are {', '.join(METHODS)}.")
    options = dict(_read_option(name, text) for text in given)
    if len(options) < len(given) or (base in _RETAINING and "retain" in options):
        raise ValueError(f"method {name!r} sets an option twice; give each once.")
    if base in ("autoregressive", SCHEDULED) and options:
        why = "plain decoding has no options" if base == "autoregressive" else "its profile holds what it may do"
        raise ValueError(f"method {name!r}: {why}; leave out {', '.join(options)}.")
    if base == SCHEDULED and request.schedule is None:
        raise ValueError(
            "method scheduled needs the costs of this machine; measure them with `reanchor-jax profile` and give --profile FILE."
        )
    if base != "autoregressive" and models.drafter is None:
        raise ValueError(f"method {name} needs a drafter and there is none; give one, or use the method autoregressive.")
    vocab_size = models.target.config.vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt or not all(0 <= token < vocab_size for token in prompt):
            raise ValueError(f"prompt {index} must hold at least one token, and only ids of the target's vocabulary 0..{vocab_size - 1}.")
    cache_length = _cache_length(models, prompts, request)
    if base == "autoregressive":
        return DecodeConfig.autoregressive(cache_length=cache_length)
    assert models.drafter is not None
    asked: dict[str, Any] = {"cache_length": cache_length, "draft_choice": request.draft_choice}
    if base not in ("dflash", SCHEDULED) and request.num_nodes:
        asked["num_nodes"] = request.num_nodes
    if base == "reanchor" and request.retain:
        asked["retain"] = request.retain
    if base in _RETAINING:
        asked["retain"] = base.removeprefix("reanchor-")
    if base == SCHEDULED:
        asked["schedule"] = request.schedule
    presets = {
        SCHEDULED: DecodeConfig.scheduled,
        "dflash": DecodeConfig.dflash,
        "ddtree": DecodeConfig.ddtree,
        "reanchor-tree": DecodeConfig.reanchor_tree,
    }
    try:
        config = presets.get(base, DecodeConfig.reanchor)(**(asked | options))
        config.resolve(models.drafter.config.block_size)  # raises if the nodes cannot hold a block
    except ValueError as error:
        raise ValueError(f"method {name}: {error}") from error
    return config


def prompt_limit(models: Models, request: Request) -> int:
    """Tokens of the longest prompt that the target, and the cache length asked for, hold together with the new tokens."""
    limit = models.target.config.max_positions
    return min(limit, request.cache_length or limit) - request.max_new_tokens


def begin(
    models: Models, prompts: Sequence[Sequence[int]], indices: Sequence[int], *, config: DecodeConfig, request: Request
) -> tuple[DecodeState, Emitted]:
    """Prefill the prompts at the given indices, padded to the longest of all; a batch that is not full gets rows that end at once."""
    num_real = len(indices)
    rows = [*indices, *[indices[0]] * (request.batch_size - num_real)]
    tokens, lengths = pad_prompts([prompts[row] for row in rows], length=max(map(len, prompts)))
    budgets = np.full((len(rows),), request.max_new_tokens, np.int32)
    budgets[num_real:] = 1
    return _prefill(
        models,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), jnp.asarray(rows, jnp.uint32)),
        request.sampling(len(rows)),
        jnp.asarray(budgets),
        config=config,
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
    )


def run_rounds(
    models: Models, state: DecodeState, *, config: DecodeConfig, request: Request, limit: int | None = None
) -> tuple[DecodeState, StepInfo]:
    """Run rounds, compiled as one loop, until every row has ended or `limit` rounds are done. The state given is used up.

    The StepInfo is stacked, [rounds B], its emitted tokens included; rounds that did not happen hold 0.
    """
    size = round_up(request.max_new_tokens, CACHE_CHUNK)  # many values of max_new_tokens share one program
    return _rounds(models, state, jnp.int32(size if limit is None else limit), config=config, size=size)


def outcomes(first: Emitted, info: StepInfo, state: DecodeState, num_prompts: int) -> list[Outcome]:
    """Outcomes of the first num_prompts rows: the prefill's token, then those of the rounds."""
    assert info.emitted is not None
    begun, emitted, counts = (np.asarray(x) for x in (first.tokens, info.emitted.tokens, info.num_emitted))
    passes = per_pass(info)
    is_pass = np.asarray(passes.num_emitted) > 0
    finish = np.asarray(state.finish)
    return [
        Outcome(
            tokens=[int(begun[row, 0])]
            + [int(token) for block, count in zip(emitted[:, row], counts[:, row], strict=True) for token in block[:count]],
            finish_reason=FINISH_REASONS[finish[row]],
            rounds={name: np.asarray(getattr(passes, name))[:, row][is_pass[:, row]].astype(int).tolist() for name in ROUND_FIELDS},
        )
        for row in range(num_prompts)
    ]


def stream(models: Models, prompts: Sequence[Sequence[int]], index: int, *, config: DecodeConfig, request: Request) -> Iterator[Outcome]:
    """Decode the prompt at an index, yielding after the prefill and after every round what has come so far.

    Runs the programs of `begin` and `run_rounds`, a round a call. The finish_reason is `running` until the last.
    """
    request = replace(request, batch_size=1)
    state, first = begin(models, prompts, [index], config=config, request=request)
    whole = Outcome(
        tokens=[int(first.tokens[0, 0])], finish_reason=FINISH_REASONS[int(state.finish[0])], rounds={name: [] for name in ROUND_FIELDS}
    )
    yield whole
    while whole.finish_reason == "running":
        state, info = run_rounds(models, state, config=config, request=request, limit=1)
        new = outcomes(first, info, state, 1)[0]
        whole = Outcome(
            tokens=whole.tokens + new.tokens[1:],
            finish_reason=new.finish_reason,
            rounds={name: values + new.rounds[name] for name, values in whole.rounds.items()},
        )
        yield whole


def step_info(outcome: Outcome) -> StepInfo:
    """The outcome's rounds as a stacked StepInfo of one row, [rounds 1]."""
    return StepInfo(emitted=None, trace=None, **{name: jnp.asarray(outcome.rounds[name], jnp.int32)[:, None] for name in ROUND_FIELDS})


@partial(jax.jit, static_argnames=("config", "max_new_tokens", "stop_token_ids"))
def _prefill(models, prompts, lengths, keys, sampling, budgets, *, config, max_new_tokens, stop_token_ids):
    return prefill(
        models,
        prompts,
        lengths,
        keys,
        config=config,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        budgets=budgets,
    )


@partial(jax.jit, static_argnames=("config", "size"), donate_argnames="state")
def _rounds(models, state, limit, *, config, size):
    _, shapes = jax.eval_shape(partial(step, config=config), models, state)
    infos = jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), shapes)

    def is_running(carry):
        state, _, num_done = carry
        return jnp.any(state.finish == RUNNING) & (num_done < limit)

    def advance(carry):
        state, infos, num_done = carry
        state, info = step(models, state, config=config)
        return state, jax.tree.map(lambda buffer, x: buffer.at[num_done].set(x), infos, info), num_done + 1

    state, infos, _ = jax.lax.while_loop(is_running, advance, (state, infos, jnp.int32(0)))
    return state, infos


def _read_option(name: str, text: str) -> tuple[str, Any]:
    """An option of a method's name, with its value in the type of the field. Raises ValueError for another option or another type."""
    option, _, value = text.partition("=")
    if option not in OPTIONS:
        raise ValueError(f"method {name!r} sets {option!r}; options are {', '.join(OPTIONS)}, each written option=value.")
    kind = type(next(field.default for field in fields(DecodeConfig) if field.name == option))
    # written in one way only, so that one config has one name
    forms = {bool: ("true|false", "true or false"), int: ("0|[1-9][0-9]{0,8}", "a whole number"), float: (r"[0-9]+(\.[0-9]+)?", "a number")}
    form, wanted = forms.get(kind, (".*", ""))
    if not re.fullmatch(form, value):
        raise ValueError(f"method {reprlib.repr(name)}: {option} must be {wanted}; got {reprlib.repr(value)}.")
    return option, value == "true" if kind is bool else kind(value)


def _cache_length(models: Models, prompts: Sequence[Sequence[int]], request: Request) -> int:
    """The asked cache length, or the least multiple of a cache chunk that holds the longest prompt and its new tokens."""
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    needed = len(prompts[longest]) + request.max_new_tokens
    limit = models.target.config.max_positions
    if len(prompts[longest]) > prompt_limit(models, request):
        what = f"the {limit} positions of the target" if needed > limit else f"cache_length ({request.cache_length})"
        raise ValueError(
            f"prompt {longest} ({len(prompts[longest])} tokens) + max_new_tokens ({request.max_new_tokens}) exceed {what}; "
            "shorten the prompt or ask for fewer tokens."
        )
    return request.cache_length or min(round_up(needed, CACHE_CHUNK), limit)
