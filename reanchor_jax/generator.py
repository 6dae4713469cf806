"""Texts in, texts out: `generate` with transformers' GenerationConfig, streamers and stop strings.

In: a pair, prompts (texts, conversations or token ids), a GenerationConfig or keywords of its fields.
Out: Completions; or text piece by piece.
Source: the interface of transformers' `generate`; the tokens are those of `decoding.loop`.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from reanchor_jax import pairs
from reanchor_jax.decoding.config import DecodeConfig
from reanchor_jax.decoding.loop import generate, prefill, step
from reanchor_jax.decoding.sampling import Bans, banned, filter_logits, make_sampling, row_keys
from reanchor_jax.decoding.state import FINISH_REASONS, round_up
from reanchor_jax.decoding.verify import prompt_mask
from reanchor_jax.decoding.walk import RUNNING, STOP
from reanchor_jax.files import read_json
from reanchor_jax.generation import TextRequest, read_request
from reanchor_jax.models.drafter import Models
from reanchor_jax.statistics import Emitted
from reanchor_jax.streaming import Follower, continuation
from reanchor_jax.text import encode, encode_messages, load_tokenizer, pad_prompts

MOST_CACHED = 4096  # tokens a row can hold unless a config says otherwise
_SCORED = 64  # sequences are scored at multiples of this length, so that few programs are compiled

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Completion(NamedTuple):
    """What followed one prompt.

    text: None without a tokenizer; it ends before a stop string. token_ids: with the stop token, or the token that completes a stop string.
    log_probs: nats, the target's own, of each token; processed_log_probs: after temperature, filters and bans (0 in greedy decoding).
    finish_reason: stop, stop_string or length. acceptance_lengths: tokens of each target pass.
    scores, logits: of each token over the vocabulary, after and before temperature, filters and bans, where they were asked for.
    """

    prompt_ids: list[int]
    text: str | None
    token_ids: list[int]
    log_probs: Float[np.ndarray, " T"]
    processed_log_probs: Float[np.ndarray, " T"]
    finish_reason: str
    acceptance_lengths: list[int]
    scores: Float[np.ndarray, "T V"] | None = None
    logits: Float[np.ndarray, "T V"] | None = None


@dataclass
class Row:
    """A row under way. follower: of its text, where that is wanted. num_new: tokens that its last round brought."""

    prompt_ids: list[int]
    follower: Follower | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    processed_log_probs: list[float] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    finish_reason: str = "running"
    num_new: int = 0

    def take(self, emitted: Emitted, index: int, finish: int, *, is_round: bool) -> None:
        """Append what a pass emitted at an index of its batch; finish: the code of the row's finish reason. is_round: it was no prefill."""
        self.num_new = 0
        if self.finish_reason != "running":
            return
        count = int(emitted.num_emitted[index])
        tokens = np.asarray(emitted.tokens[index, :count]).tolist()
        self.num_new = count if self.follower is None else self.follower.add(tokens)
        self.token_ids += tokens[: self.num_new]
        self.log_probs += np.asarray(emitted.log_probs[index, : self.num_new]).tolist()
        self.processed_log_probs += np.asarray(emitted.processed_log_probs[index, : self.num_new]).tolist()
        self.acceptance_lengths += [count] if is_round else []
        is_stopped = self.follower is not None and self.follower.is_stopped
        self.finish_reason = "stop_string" if is_stopped else FINISH_REASONS[finish]


class Generator:
    """A pair with its tokenizer and the model's own generation settings, ready for texts.

    pair: an embedded pair's name, a directory, or Models (then give a tokenizer, or ask with token ids only).
    config: how to decode; None is ReAnchor (plain decoding without a drafter), for as many tokens as the target has positions, or 4,096.
    Every call compiles once for a number of rows; other prompts, lengths and sampling values compile nothing.
    Raises FileNotFoundError and ValueError as `load_pair` does.
    """

    def __init__(self, pair: str | Path | Models, *, tokenizer: Any = None, config: DecodeConfig | None = None, dtype: Any = None):
        self.tokenizer, self._of_model = tokenizer, {}
        if isinstance(pair, Models):
            self.models = pair
        else:
            self.models = pairs.load_pair(pair, dtype=dtype)
            directory = pairs.find(pair).target
            self.tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
            self._of_model = read_json(directory / "generation_config.json") or {}
        if config is None:
            length = min(self.models.target.config.max_positions, MOST_CACHED)
            has_drafter = self.models.drafter is not None
            config = (DecodeConfig.reanchor if has_drafter else DecodeConfig.autoregressive)(cache_length=length)
        self.config = config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        generation_config: Any = None,
        streamer: Any = None,
        seed: int = 0,
        thinking: bool | None = None,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or several together; of several, and of several sequences a prompt, a list comes back.

        prompts: a text; a conversation (a list of messages with role and content, put through the chat template); or token ids.
        generation_config, fields: a transformers GenerationConfig and its fields as keywords; `generation.HONOURED` lists those that are
            honoured, any other raises. What neither says is the model's own. Without a length, 256 tokens.
        streamer: put() is given the prompt's ids and then each round's, end() at the end, as transformers does; one prompt only.
        seed: row i draws with the key fold_in(key(seed), i); the same seed gives the same text.
        thinking: `enable_thinking` of the chat template.
        Raises ValueError for what is not honoured and for prompts that do not fit, before anything is compiled.
        """
        is_one = _is_one(prompts)
        request = self.request(generation_config, fields)
        ids = self._ids([prompts] if is_one else prompts, thinking)
        rows = [prompt for prompt in ids for _ in range(request.num_return_sequences)]
        if streamer is not None and len(rows) > 1:
            raise ValueError(f"a streamer follows one sequence; got {len(rows)}; use stream_batch().")
        if streamer is None and not request.stop_strings:
            found = self._whole(rows, request, seed)
        else:
            if streamer is not None:
                streamer.put(np.asarray(rows[0]))
            found = []
            for found in self._rounds(rows, request, seed):
                if streamer is not None and found[0].num_new:
                    streamer.put(np.asarray(found[0].token_ids[-found[0].num_new :]))
            if streamer is not None:
                streamer.end()
        completions = [self.completion(row, request) for row in found]
        return completions[0] if is_one and len(completions) == 1 else completions

    def stream(self, prompt: Prompt, **asked: Any) -> Iterator[str]:
        """Yield one prompt's completion piece by piece, a piece a round at most; joined, they are its text. Arguments as `generate`'s.

        Characters whose bytes are not all there wait, and so does what may become a stop string.
        """
        if not _is_one(prompt):
            raise ValueError("stream() takes one prompt; use stream_batch() for several.")
        for _, piece in self.stream_batch([prompt], **asked):
            yield piece

    def stream_batch(
        self, prompts: Sequence[Prompt], *, generation_config: Any = None, seed: int = 0, thinking: bool | None = None, **fields: Any
    ) -> Iterator[tuple[int, str]]:
        """Yield (row, piece) of several prompts decoded together, as each comes. Arguments as `generate`'s."""
        request = self.request(generation_config, fields)
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer to make text with; give one, or use generate().")
        rows = [prompt for prompt in self._ids(prompts, thinking) for _ in range(request.num_return_sequences)]
        for found in self._rounds(rows, request, seed, is_text=True):
            for index, row in enumerate(found):
                assert row.follower is not None
                is_last = row.num_new > 0 and row.finish_reason != "running"
                if piece := row.follower.take() + (row.follower.close() if is_last else ""):
                    yield index, piece

    async def generate_async(self, prompts: Prompt | Sequence[Prompt], **asked: Any) -> Completion | list[Completion]:
        """`generate` in a thread, for an event loop that must go on meanwhile."""
        return await asyncio.to_thread(partial(self.generate, prompts, **asked))

    async def stream_async(self, prompt: Prompt, **asked: Any) -> AsyncIterator[str]:
        """`stream` in threads, for an event loop that must go on meanwhile."""
        pieces, end = self.stream(prompt, **asked), object()
        while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
            yield piece  # pyright: ignore[reportReturnType] - all but the end are text

    def request(self, generation_config: Any, fields: Mapping[str, Any]) -> TextRequest:
        """What a GenerationConfig and its fields ask of this model. Raises ValueError as `read_request`."""
        request = read_request(generation_config, fields, of_model=self._of_model, stop_token_ids=self.models.target.config.eos_token_ids)
        if request.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer to be seen; give one, or stop at eos_token_id.")
        return request

    def _ids(self, prompts: Any, thinking: bool | None) -> list[list[int]]:
        if not len(prompts):
            raise ValueError("prompts is empty; give one prompt at least.")
        ids = []
        for index, prompt in enumerate(prompts):
            try:
                ids.append(self.encode(prompt, thinking))
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return ids

    def encode(self, prompt: Any, thinking: bool | None) -> list[int]:
        if isinstance(prompt, str):
            if thinking is not None:
                raise ValueError("thinking is a chat template's; give the prompt as messages.")
            return encode(self.tokenizer, prompt)
        entries = list(prompt)
        if not entries:
            raise ValueError("it is empty; a prompt needs at least one token.")
        if isinstance(entries[0], Mapping):
            return encode_messages(self.tokenizer, entries, thinking=thinking)
        if not all(isinstance(token, (int, np.integer)) for token in entries):
            raise ValueError(f"it must be a text, token ids or messages; got {type(entries[0]).__name__}.")
        return [int(token) for token in entries]

    def arguments(self, prompts: Sequence[Sequence[int]], request: TextRequest, keys: Key[Array, " B"]) -> dict[str, Any]:
        """Arguments of the core's `generate` and `prefill`, a key a prompt."""
        tokens, lengths = pad_prompts(prompts)
        budgets = np.asarray([request.most_new(len(prompt)) for prompt in prompts], np.int32)
        has_least = bool(request.min_new_tokens or request.min_length)
        least = np.asarray([request.least_new(len(prompt)) for prompt in prompts], np.int32) if has_least else 0
        return {
            "models": self.models,
            "prompts": tokens,
            "prompt_lengths": lengths,
            "key": keys,
            "config": self.config,
            "sampling": make_sampling(len(prompts), **(request.sampling or {"temperature": 0.0})),
            "max_new_tokens": int(budgets.max()),
            "stop_token_ids": request.stop_token_ids,
            "budgets": budgets,
            "min_new_tokens": least,
            "suppressed_token_ids": request.suppressed_token_ids,
        }

    def _whole(self, prompts: Sequence[Sequence[int]], request: TextRequest, seed: int) -> list[Row]:
        """Rows to their ends in one compiled call."""
        result = jax.device_get(generate(**self.arguments(prompts, request, row_keys(jax.random.key(seed), len(prompts)))))
        passes = result.info.num_emitted[: int(result.num_rounds)]
        rows = []
        for index, prompt in enumerate(prompts):
            length = int(result.lengths[index])
            rows.append(
                Row(
                    prompt_ids=list(prompt),
                    follower=None,
                    token_ids=result.tokens[index, :length].tolist(),
                    log_probs=result.log_probs[index, :length].tolist(),
                    processed_log_probs=result.processed_log_probs[index, :length].tolist(),
                    acceptance_lengths=[int(count) for count in passes[:, index] if count],
                    finish_reason=FINISH_REASONS[int(result.finish_reasons[index])],
                )
            )
        return rows

    def _rounds(self, prompts: Sequence[Sequence[int]], request: TextRequest, seed: int, *, is_text: bool = False) -> Iterator[list[Row]]:
        """Rows as they stand after the prefill and after every round; a row whose stop string is complete is ended on the device."""
        arguments = self.arguments(prompts, request, row_keys(jax.random.key(seed), len(prompts)))
        has_text = is_text or bool(request.stop_strings)
        rows = [Row(list(prompt), Follower(self.tokenizer, prompt, request.stop_strings) if has_text else None) for prompt in prompts]
        state, emitted = prefill(**arguments)
        is_round = False
        while True:
            new, finish = jax.device_get((emitted, state.finish))
            is_stopped = np.zeros(len(rows), bool)
            for index, row in enumerate(rows):
                row.take(new, index, int(finish[index]), is_round=is_round)
                is_stopped[index] = row.finish_reason == "stop_string"
            yield rows
            if all(row.finish_reason != "running" for row in rows):
                return
            if is_stopped.any():
                state = state._replace(finish=jnp.where(is_stopped & (state.finish == RUNNING), STOP, state.finish))
            state, info = run_round(self.models, state, config=self.config)
            emitted, is_round = info.emitted, True

    def completion(self, row: Row, request: TextRequest) -> Completion:
        """What became of a row that has ended."""
        if row.follower is not None:
            row.follower.close()
        scores = logits = None
        if request.has_scores or request.has_logits:
            scores, logits = self._scored(row, request)
        return Completion(
            prompt_ids=row.prompt_ids,
            text=continuation(self.tokenizer, row.prompt_ids, row.token_ids) if row.follower is None else row.follower.text,
            token_ids=row.token_ids,
            log_probs=np.asarray(row.log_probs, np.float32),
            processed_log_probs=np.asarray(row.processed_log_probs, np.float32),
            finish_reason=row.finish_reason,
            acceptance_lengths=row.acceptance_lengths,
            scores=scores if request.has_scores else None,
            logits=logits if request.has_logits else None,
        )

    def _scored(self, row: Row, request: TextRequest) -> tuple[np.ndarray, np.ndarray]:
        """Scores and logits of a row's tokens, from one more pass over its text."""
        first, count = len(row.prompt_ids) - 1, len(row.token_ids)
        text = row.prompt_ids + row.token_ids[:-1]
        tokens, _ = pad_prompts([text], length=round_up(len(text), _SCORED))
        ids = [np.asarray(given or [-1], np.int32) for given in (request.suppressed_token_ids, request.stop_token_ids)]
        depths = np.arange(tokens.shape[1], dtype=np.int32)[None] - first
        scores, logits = _score(
            self.models.target,
            tokens,
            make_sampling(1, **(request.sampling or {"temperature": 0.0})),
            Bans(token_ids=jnp.asarray(ids[0]), num_owed=jnp.asarray([request.least_new(len(row.prompt_ids))], jnp.int32)),
            jnp.asarray(ids[1]),
            depths,
        )
        return np.asarray(scores[0, first : first + count]), np.asarray(logits[0, first : first + count])


run_round = jax.jit(step, static_argnames="config", donate_argnames="state")


@jax.jit
def _score(target, tokens, sampling, bans, stop_token_ids, depths):
    """Scores and logits [B S V] behind every token: logits after bans, temperature and filters; and as they are."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    logits = target.logits(target(tokens, positions, prompt_mask(tokens.shape[1])).states).astype(jnp.float32)
    is_banned = banned(bans, stop_token_ids, depths, vocab_size=logits.shape[-1])
    assert is_banned is not None
    allowed = jnp.where(is_banned, -jnp.inf, logits)
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None, None]
    is_kept = (filter_logits(allowed, sampling) > -jnp.inf) | (sampling.temperature == 0)[:, None, None]
    return jnp.where(is_kept, allowed / temperature, -jnp.inf), logits


def _is_one(prompts: Any) -> bool:
    """Whether this is one prompt: a text, token ids, or messages."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts must be a text, token ids, messages, or a list of such; got {type(prompts).__name__}.")
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)
