"""What a text request asks for, in the fields of transformers' GenerationConfig.

In: a GenerationConfig, keywords of the same names, the model's own generation_config.json.
Out: a TextRequest; ValueError naming what is not honoured.
Source: transformers 5 (`GenerationConfig`): what is set nowhere has the value that its `generate` gives it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from reanchor_jax.decoding.sampling import check_sampling
from reanchor_jax.fields import is_integer

_DEFAULT_NEW_TOKENS = 256
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}  # of rows that sample, where nothing is said
HONOURED = (
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "eos_token_id",
    "do_sample",
    *_SAMPLING,
    "stop_strings",
    "suppress_tokens",
    "bad_words_ids",
    "num_return_sequences",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
)
# nothing to honour: prompts are never empty and rows never padded, and where the values come from changes no text
_WITHOUT_MEANING = ("bos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
# how transformers runs, not what it writes: a model's own file may say it, a caller who says it is told
_MACHINERY = (
    "cache_implementation",
    "cache_config",
    "compile_config",
    "disable_compile",
    "continuous_batching_config",
    "max_cache_len",
    "prefill_chunk_size",
    "low_memory",
    "use_cache",
    "use_mtp",
    "is_assistant",
    "speculation_type",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "target_lookbehind",
)
# values that ask for nothing
_NEUTRAL: dict[str, Any] = {
    "use_cache": True,
    "num_beams": 1,
    "num_beam_groups": 1,
    "early_stopping": False,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "token_healing": False,
    "low_memory": False,
    "use_mtp": False,
    "is_assistant": False,
}


class TextRequest(NamedTuple):
    """What is asked of every row.

    max_new_tokens, min_new_tokens: tokens behind a prompt; max_length, min_length: with it, where the first are None.
    stop_token_ids: end a row, and are its last token. stop_strings: end a row with the token that completes one.
    suppressed_token_ids: never drawn. sampling: keyword arguments of `make_sampling`, one number each.
    num_return_sequences: rows a prompt. has_scores, has_logits: whether scores or logits over the vocabulary are asked for.
    """

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    suppressed_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    num_return_sequences: int
    has_scores: bool
    has_logits: bool

    def most_new(self, prompt_length: int) -> int:
        """Tokens that a row behind a prompt may emit. Raises ValueError if max_length leaves none."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return _DEFAULT_NEW_TOKENS
        if prompt_length >= self.max_length:
            raise ValueError(f"a prompt of {prompt_length} tokens leaves none of max_length ({self.max_length}); give max_new_tokens.")
        return self.max_length - prompt_length

    def least_new(self, prompt_length: int) -> int:
        """Tokens that a row behind a prompt emits before it may end."""
        if self.min_new_tokens is not None:
            return self.min_new_tokens
        return max((self.min_length or 0) - prompt_length, 0)


def read_request(
    generation_config: Any, keywords: Mapping[str, Any], *, of_model: Mapping[str, Any], stop_token_ids: Sequence[int]
) -> TextRequest:
    """Merge, check and translate a request.

    generation_config: a GenerationConfig, a mapping of its fields, or None; its None fields say nothing. keywords win over it, and it over
    of_model, the model's generation_config.json. stop_token_ids: where none of them names eos_token_id.
    Raises ValueError naming every field that is set to what is not honoured, and for values out of range.
    """
    given = _fields(generation_config)
    asked = {**given, **keywords}
    _check_honoured(asked, is_callers=True)
    inherited = {name: value for name, value in of_model.items() if name not in asked}
    _check_honoured(inherited, is_callers=False)
    merged = {**inherited, **asked}
    is_sampled = _flag(merged, "do_sample")
    if not is_sampled and (idle := [name for name in _SAMPLING if keywords.get(name) is not None]):
        raise ValueError(f"{', '.join(idle)} would do nothing: give do_sample=True with it, or leave it out.")
    sampling = {name: default if merged.get(name) is None else merged[name] for name, default in _SAMPLING.items()}
    for name, value in sampling.items():
        check_sampling(name, value)
        if np.shape(value):
            raise ValueError(f"{name} must be one number for all prompts; got {value!r}.")
    if is_sampled and sampling["temperature"] == 0:
        raise ValueError("temperature must be more than 0 with do_sample=True; got 0; use do_sample=False for greedy decoding.")
    _flag(merged, "return_dict_in_generate")  # results are records either way
    ends = merged.get("eos_token_id")
    return TextRequest(
        max_new_tokens=_count(merged, "max_new_tokens", least=1),
        max_length=_count(merged, "max_length", least=1),
        min_new_tokens=_count(merged, "min_new_tokens", least=0),
        min_length=_count(merged, "min_length", least=0),
        stop_token_ids=tuple(stop_token_ids) if ends is None else _ids("eos_token_id", [ends] if is_integer(ends) else ends),
        stop_strings=_strings(merged.get("stop_strings")),
        suppressed_token_ids=_suppressed(merged),
        sampling=sampling if is_sampled else {},
        num_return_sequences=_count(merged, "num_return_sequences", least=1) or 1,
        has_scores=_flag(merged, "output_scores"),
        has_logits=_flag(merged, "output_logits"),
    )


def _fields(generation_config: Any) -> dict[str, Any]:
    """What a GenerationConfig sets."""
    if generation_config is None:
        return {}
    if not isinstance(generation_config, Mapping):
        if not hasattr(generation_config, "to_dict"):
            kind = type(generation_config).__name__
            raise ValueError(f"generation_config must be a transformers GenerationConfig or a mapping of its fields; got {kind}.")
        generation_config = generation_config.to_dict()
    return {name: value for name, value in generation_config.items() if value is not None}


def _check_honoured(fields: Mapping[str, Any], *, is_callers: bool) -> None:
    known = {*HONOURED, *_WITHOUT_MEANING, *(() if is_callers else _MACHINERY)}
    refused = [
        f"{name}={value!r}"
        for name, value in sorted(fields.items())
        if not (name in known or value is None or (name in _NEUTRAL and value == _NEUTRAL[name]))
    ]
    if refused:
        where = (
            "" if is_callers else " (of the model's generation_config.json; give a value that asks for nothing, as repetition_penalty=1.0)"
        )
        raise ValueError(f"{', '.join(refused)} is not honoured{where}; honoured are {', '.join(HONOURED)}.")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False; got {value!r}.")
    return bool(value)


def _count(fields: Mapping[str, Any], name: str, *, least: int) -> int | None:
    value = fields.get(name)
    if value is not None and (not is_integer(value) or value < least):
        raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}.")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, (list, tuple)) or not all(is_integer(token) and token >= 0 for token in ids):
        raise ValueError(f"{name} must hold token ids, whole numbers of 0 or more; got {value!r}.")
    return tuple(ids)


def _strings(value: Any) -> tuple[str, ...]:
    strings = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings must be texts that are not empty; got {value!r}.")
    return strings


def _suppressed(fields: Mapping[str, Any]) -> tuple[int, ...]:
    words = fields.get("bad_words_ids") or ()
    if long := [word for word in words if not isinstance(word, (list, tuple)) or len(word) != 1]:
        raise ValueError(f"bad_words_ids may hold single tokens only, each as a list of one; got {long[0]!r}.")
    return _ids("suppress_tokens", fields.get("suppress_tokens") or ()) + tuple(_ids("bad_words_ids", word)[0] for word in words)
