"""Methods by name, and running prompts through one: in batches, or one prompt round by round.

In: Models, prompts as token ids, a Request, a method's DecodeConfig.
Out: Outcomes on the host, a prompt each; or the tokens of each round as they come.
Source: the presets of DecodeConfig. A prompt's key is folded from the seed and its index, so a batch size changes no output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import CACHE_CHUNK, DRAFT_CHOICES, RETAIN_POLICIES, DecodeConfig, DraftChoice
from reanchor_jax.decoding.loop import FINISH_REASONS, Generation, generate, prefill, step
from reanchor_jax.decoding.sampling import Sampling, make_sampling
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import StepInfo

# the paper's ReAnchor retains baseline states; the other policies are methods of their own
METHODS = ("autoregressive", "dflash", "reanchor", *(f"reanchor-{name}" for name in RETAIN_POLICIES if name not in ("none", "baseline")))
ROUND_FIELDS = tuple(name for name in StepInfo._fields if name != "emitted")

_BLOCKS_RETAINED = {"baseline": 1, "deepest": 2, "both": 3}  # longest retained chain, in blocks without their anchor


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of every method alike.

    retain, num_nodes: of the method `reanchor` (None: the paper's) and of all its kin (None: 256 nodes).
    cache_length: tokens a row can hold; None: what the longest prompt needs.
    batch_size: prompts decoded together.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    draft_choice: DraftChoice = "argmax"
    retain: str | None = None
    num_nodes: int | None = None
    cache_length: int | None = None
    batch_size: int = 1

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in 0..2^63-1; got {self.seed}.")
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


def method_config(name: str, models: Models, prompts: Sequence[Sequence[int]], *, request: Request) -> DecodeConfig:
    """Config of a method for these models and prompts. Raises ValueError for an unknown name, and for what the models or caches cannot do."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; methods are {', '.join(METHODS)}.")
    if name != "autoregressive" and models.drafter is None:
        raise ValueError(f"method {name} needs a drafter and there is none; give one, or use the method autoregressive.")
    cache_length = _cache_length(models, prompts, request)
    if name == "autoregressive":
        return DecodeConfig.autoregressive(cache_length=cache_length)
    assert models.drafter is not None
    block_size = models.drafter.config.block_size
    if name == "dflash":
        return DecodeConfig.dflash(cache_length=cache_length, draft_choice=request.draft_choice)
    retain = name.removeprefix("reanchor-") if name != "reanchor" else request.retain or "baseline"
    if retain not in _BLOCKS_RETAINED:
        raise ValueError(f"retain must be one of {', '.join(_BLOCKS_RETAINED)}; got {retain!r}.")
    config = DecodeConfig.reanchor(
        retain=retain,
        max_offsets=_BLOCKS_RETAINED[retain] * (block_size - 1),
        cache_length=cache_length,
        draft_choice=request.draft_choice,
        **({} if request.num_nodes is None else {"num_nodes": request.num_nodes}),
    )
    config.resolve(block_size)  # raises if the nodes cannot hold a block
    return config


def run_batch(
    models: Models,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    *,
    config: DecodeConfig,
    request: Request,
    is_prefill_only: bool = False,
) -> Generation:
    """Generate for the prompts at the given indices; a batch that is not full is filled with rows that end at once.

    is_prefill_only: the same compiled program with a budget of one token a row, so that no round is run.
    """
    num_real = len(indices)
    rows = [*indices, *[indices[0]] * (request.batch_size - num_real)]
    lengths = np.asarray([len(prompts[row]) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, index in enumerate(rows):
        tokens[row, : lengths[row]] = prompts[index]
    budgets = np.full((len(rows),), 1 if is_prefill_only else request.max_new_tokens, np.int32)
    budgets[num_real:] = 1
    return generate(
        models,
        tokens,
        lengths,
        _prompt_keys(request, rows),
        config=config,
        sampling=request.sampling(len(rows)),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        budgets=budgets,
    )


def outcomes(result: Generation, num_prompts: int) -> list[Outcome]:
    """Outcomes of the first num_prompts rows of a generation."""
    info = {name: np.asarray(getattr(result.info, name)) for name in ROUND_FIELDS}
    tokens, lengths, reasons = (np.asarray(x) for x in (result.tokens, result.lengths, result.finish_reasons))
    return [
        Outcome(
            tokens=tokens[row, : lengths[row]].tolist(),
            finish_reason=FINISH_REASONS[reasons[row]],
            rounds={name: values[:, row][info["num_emitted"][:, row] > 0].astype(int).tolist() for name, values in info.items()},
        )
        for row in range(num_prompts)
    ]


def step_info(outcome: Outcome) -> StepInfo:
    """The outcome's rounds as a stacked StepInfo of one row, [rounds 1]."""
    return StepInfo(emitted=None, **{name: np.asarray(outcome.rounds[name], int)[:, None] for name in ROUND_FIELDS})


def stream(models: Models, prompts: Sequence[Sequence[int]], index: int, *, config: DecodeConfig, request: Request) -> Iterator[Outcome]:
    """Decode the prompt at an index round by round, yielding after the prefill and after every round what has come so far.

    Tokens equal those of `run_batch`. The finish_reason is `running` until the last.
    """
    prompt = jnp.asarray([prompts[index]], jnp.int32)
    begin = partial(
        prefill,
        config=config,
        sampling=request.sampling(1),
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
    )
    state, emitted = jax.jit(begin)(models, prompt, jnp.asarray([prompt.shape[1]], jnp.int32), _prompt_keys(request, [index]))
    advance = jax.jit(partial(step, config=config), donate_argnums=1)
    rounds: dict[str, list[int]] = {name: [] for name in ROUND_FIELDS}
    tokens: list[int] = []
    while True:
        tokens = tokens + np.asarray(emitted.tokens)[0, : int(emitted.num_emitted[0])].tolist()
        reason = FINISH_REASONS[int(state.finish[0])]
        yield Outcome(tokens=tokens, finish_reason=reason, rounds=rounds)
        if reason != "running":
            return
        state, info = advance(models, state)
        emitted = info.emitted
        rounds = {name: [*values, int(getattr(info, name)[0])] for name, values in rounds.items()}


def _prompt_keys(request: Request, indices: Sequence[int]):
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), jnp.asarray(indices, jnp.uint32))


def _cache_length(models: Models, prompts: Sequence[Sequence[int]], request: Request) -> int:
    """The asked cache length, or the least multiple of a cache chunk that holds the longest prompt and its new tokens."""
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    needed = len(prompts[longest]) + request.max_new_tokens
    limit = models.target.config.max_positions
    if needed > min(limit, request.cache_length or limit):
        what = f"the {limit} positions of the target" if needed > limit else f"cache_length ({request.cache_length})"
        raise ValueError(
            f"prompt {longest} ({len(prompts[longest])} tokens) + max_new_tokens ({request.max_new_tokens}) exceed {what}; "
            "shorten the prompt or ask for fewer tokens."
        )
    return request.cache_length or min(-(-needed // CACHE_CHUNK) * CACHE_CHUNK, limit)
