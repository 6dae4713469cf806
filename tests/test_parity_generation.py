"""Whole greedy generations equal those of PyPI dflash 0.1.0 round by round, and plain decoding equals transformers' `generate`.

The reference shortens its last blocks to the tokens that are left; we never draft a block of another size than the trained one. Where block
slots see later slots this may change the last drafts, never a token. So rounds are compared with the reference given room for a block more
and cut at the budget, and directly wherever its blocks are whole; where slots see no later slots, directly everywhere.
"""

import functools
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from greedy import check_divergences, divergences, transformers_greedy
from tiny import random_models, tiny_drafter_config, tiny_llama_config, tiny_qwen3_config

from reanchor_jax import DecodeConfig, Models, acceptance_lengths, autoregress, checkpoint, generate, pairs
from reanchor_jax.convert.engine import export_huggingface
from reanchor_jax.generator import Generator
from reanchor_jax.text import encode, load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
dflash = pytest.importorskip("dflash.model")

pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # dflash calls transformers by its old name

BUDGETS = (41, 1, 2, 20, 3, 7, 9, 8)  # a block of 7 shrinks from the start, after a round, after many
PROMPT_LENGTHS = (1, 5, 11, 29, 64, 70, 2, 13)
STORIES = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, Tom and his dog",
    "The big bear was",
    "Sara had a red ball.",
    "In the garden there was",
    "It was a sunny day and",
)

_LLAMA, _QWEN3 = tiny_llama_config(tie_word_embeddings=True), tiny_qwen3_config()
_SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 9, "use_sliding_window": True}
# a target, its drafter, and whether that drafter copies what was said last (or is random and always wrong)
PAIRS = {
    "random": (_LLAMA, tiny_drafter_config(_LLAMA), False),
    "qwen3_full": (_QWEN3, tiny_drafter_config(_QWEN3, num_key_value_heads=4), True),
    # without is_causal, sliding layers are causal inside the block
    "llama_causal": (_LLAMA, tiny_drafter_config(_LLAMA, num_key_value_heads=4, **_SLIDING), True),
}
every_pair = pytest.mark.parametrize("name", PAIRS)


class Pair(NamedTuple):
    """Our models, and PyTorch's with the same weights."""

    models: Models
    target: Any
    drafter: Any


class Rounds(NamedTuple):
    """New tokens of a prompt, and how many each round committed."""

    tokens: list[int]
    acceptance_lengths: list[int]


def export(directory, out):
    exported = export_huggingface(directory, out)
    return Pair(
        models=checkpoint.load(directory),
        target=transformers.AutoModelForCausalLM.from_pretrained(exported / "target").eval(),
        drafter=dflash.DFlashDraftModel.from_pretrained(exported / "drafter").eval(),
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Function from a name in PAIRS to a Pair."""
    root = tmp_path_factory.mktemp("generation")

    @functools.cache
    def build(name):
        target_config, drafter_config, is_copying = PAIRS[name]
        models = random_models(target_config, drafter_config, seed=63)
        models = make_copying(models) if is_copying else models
        checkpoint.save(root / name, models, target_config=target_config, drafter_config=drafter_config)
        return export(root / name, root / f"{name}_exported")

    return build


def make_copying(models):
    """Let the drafter's layers add up the tokens they see, so that it drafts what was said last: a tied random target often repeats itself.

    Some of the drafter's random weights remain, so that its queries, keys and MLPs still matter.
    """
    target, drafter = (dict(checkpoint.leaves(model)) for model in models)
    width, mask = models.target.config.width, models.drafter.config.mask_token_id
    target["embedding/embedding"] = np.asarray(target["embedding/embedding"]).copy()
    target["embedding/embedding"][mask] = 0  # masks say nothing
    for name, leaf in drafter.items():
        if "fusion" in name:
            copying = 2 * np.eye(*leaf.shape, k=width - leaf.shape[0])  # the last tap
        elif "key_value" in name or "contexts" in name:  # only the values copy
            drafter[name] = np.asarray(leaf).copy()
            values = drafter[name][:, 1].reshape(width, -1)
            drafter[name][:, 1] = (0.4 * values + 2 * np.eye(*values.shape)).reshape(drafter[name][:, 1].shape)
            continue
        elif "attention/output" in name:
            copying = 2 * np.eye(*leaf.shape)
        elif "down" in name:
            copying = np.zeros(leaf.shape)
        else:
            continue
        drafter[name] = (0.4 * np.asarray(leaf) + copying).astype(np.float32)
    return Models(
        target=checkpoint.with_leaves(models.target, target),
        drafter=checkpoint.with_leaves(models.drafter, drafter),
    )


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """The embedded pair as a Pair, and prompts."""
    directory = pairs.path("stories260k")
    tokenizer = load_tokenizer(directory)
    return export(directory, tmp_path_factory.mktemp("embedded") / "exported"), [encode(tokenizer, story) for story in STORIES]


def reference(pair, prompt, *, max_new_tokens, stop_token_ids=()):
    """Rounds of `dflash_generate`. Its clock waits for CUDA, so it gets another."""
    with mock.patch.object(dflash, "_cuda_time", time.perf_counter):
        result = dflash.dflash_generate(
            pair.drafter, pair.target, torch.tensor([prompt]), max_new_tokens, list(stop_token_ids), return_stats=True
        )
    return Rounds(result.output_ids[0, len(prompt) :].tolist(), result.acceptance_lengths)


def cut(rounds, budget):
    """Rounds of a generation that had room, ended at a budget."""
    lengths, left = [], budget - 1
    for length in rounds.acceptance_lengths:
        if left > 0:
            lengths.append(min(length, left))
            left -= length
    return Rounds(rounds.tokens[:budget], lengths)


def ours(pair, prompts, *, decode=generate, max_new_tokens, budgets=None, stop_token_ids=()):
    lengths = np.asarray([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    config = DecodeConfig.dflash(cache_length=256)
    result = decode(
        pair.models,
        padded,
        lengths,
        jax.random.key(0),
        config=config,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        budgets=None if budgets is None else np.asarray(budgets),
    )
    tokens = np.asarray(result.tokens)
    return [
        Rounds(tokens[row, :length].tolist(), acceptance_lengths(result.info, row)) for row, length in enumerate(np.asarray(result.lengths))
    ]


def random_prompts():
    rng = np.random.default_rng(67)
    return [rng.integers(0, 60, length).tolist() for length in PROMPT_LENGTHS]


def check_rounds(pair, prompt, found, *, budget, stop_token_ids=()):
    """Found equals the reference: with room and cut in all, directly in tokens and in every round whose block is whole."""
    block_size = pair.models.drafter.config.block_size
    direct = reference(pair, prompt, max_new_tokens=budget, stop_token_ids=stop_token_ids)
    assert found.tokens == direct.tokens
    is_causal = all(layer.is_causal for layer in pair.models.drafter.config.layers)
    left, num_whole = budget, 0
    for length in direct.acceptance_lengths:
        num_whole += is_causal or left >= block_size
        left -= length
    assert found.acceptance_lengths[:num_whole] == direct.acceptance_lengths[:num_whole]
    if num_whole == len(direct.acceptance_lengths):
        assert found == direct
    else:
        assert found == cut(reference(pair, prompt, max_new_tokens=budget + block_size, stop_token_ids=stop_token_ids), budget)


@every_pair
def test_every_round_equals_the_reference_under_every_budget(tiny, name):
    pair, prompts = tiny(name), random_prompts()
    found = ours(pair, prompts, max_new_tokens=max(BUDGETS), budgets=BUDGETS)
    for prompt, rounds, budget in zip(prompts, found, BUDGETS, strict=True):
        check_rounds(pair, prompt, rounds, budget=budget)
    if PAIRS[name][2]:
        seen = {length for rounds in found for length in rounds.acceptance_lengths}
        assert {1, 2, 7} < seen  # nothing accepted, some, and the whole block


def test_every_round_equals_the_reference_when_a_stop_token_ends_it(tiny):
    pair, prompts = tiny("llama_causal"), random_prompts()
    stops = {}  # a token by what it was where a row first emitted it
    for rounds in ours(pair, prompts, max_new_tokens=41):
        kinds = ["prefill", *(kind for length in rounds.acceptance_lengths for kind in ["draft"] * (length - 1) + ["bonus"])]
        for token in dict.fromkeys(rounds.tokens):
            stops.setdefault(kinds[rounds.tokens.index(token)], token)
    assert stops.keys() == {"prefill", "draft", "bonus"}
    for stop in stops.values():
        found = ours(pair, prompts, max_new_tokens=41, stop_token_ids=(stop,))
        stopped = [(prompt, rounds) for prompt, rounds in zip(prompts, found, strict=True) if rounds.tokens[-1] == stop]
        assert stopped
        for prompt, rounds in stopped:
            check_rounds(pair, prompt, rounds, budget=41, stop_token_ids=(stop,))


def test_every_round_of_the_embedded_pair_equals_the_reference(embedded):
    pair, prompts = embedded
    stops = pair.models.target.config.eos_token_ids
    budgets = (101, 17, 40, 64, 90, 33)
    found = ours(pair, prompts, max_new_tokens=101, budgets=budgets, stop_token_ids=stops)
    for prompt, rounds, budget in zip(prompts, found, budgets, strict=True):
        check_rounds(pair, prompt, rounds, budget=budget, stop_token_ids=stops)
    assert max(length for rounds in found for length in rounds.acceptance_lengths) > 3


def test_plain_decoding_of_the_embedded_target_equals_transformers(embedded):
    pair, prompts = embedded
    stops = pair.models.target.config.eos_token_ids
    found = [rounds.tokens for rounds in ours(pair, prompts, decode=autoregress, max_new_tokens=101, stop_token_ids=stops)]
    expected = [transformers_greedy(pair.target, prompt, max_new_tokens=101, stop_token_ids=stops) for prompt in prompts]
    check_divergences(divergences(pair.target, prompts, expected, found))


# fields of a greedy generation, beside a budget of 48 tokens
GREEDY_FIELDS = {
    "as it is": {},
    "an end list": {"eos_token_id": [2, 421]},
    "no end before": {"eos_token_id": [421, 410, 261], "min_new_tokens": 17},
    "no end before a length": {"eos_token_id": [421, 410, 261], "min_length": 25},
    "a length": {"max_new_tokens": None, "max_length": 30},
    "suppressed": {"suppress_tokens": [421, 410], "bad_words_ids": [[261], [432]]},
    "stop strings": {"stop_strings": ["ark.", "ig", "y w"]},
}


@pytest.fixture(scope="module")
def generator(embedded):
    """The embedded pair behind texts."""
    return Generator(
        embedded[0].models, tokenizer=load_tokenizer(pairs.path("stories260k")), config=DecodeConfig.reanchor(cache_length=128)
    )


def transformers_output(pair, generator, prompt, **fields):
    ids = torch.tensor([prompt])
    asked = {"tokenizer": generator.tokenizer} if "stop_strings" in fields else {}
    return pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **{"max_new_tokens": 48, "eos_token_id": [2], **fields},
        **asked,
    )


@pytest.mark.parametrize("name", GREEDY_FIELDS)
def test_fields_of_a_greedy_generation_config_give_what_transformers_gives(embedded, generator, name):
    (pair, prompts), fields = embedded, GREEDY_FIELDS[name]
    asked = {"max_new_tokens": 48, "eos_token_id": [2], **fields, "output_scores": True, "output_logits": True}
    for prompt, found in zip(prompts, generator.generate(prompts, generation_config=transformers.GenerationConfig(), **asked), strict=True):
        theirs = transformers_output(pair, generator, prompt, **fields)
        expected = theirs.sequences[0, len(prompt) :].tolist()
        check_divergences(divergences(pair.target, [prompt], [expected], [found.token_ids]))
        for ours, tensors in ((found.scores, theirs.scores), (found.logits, theirs.logits)):
            np.testing.assert_allclose(ours, torch.cat(tensors).numpy(), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.4, "top_k": 0, "min_p": 0.1},
        {"top_k": 5, "suppress_tokens": [421, 410], "min_new_tokens": 3},
        {"top_k": 0, "top_p": 0.5},
    ],
    ids=str,
)
def test_a_sampled_token_has_the_law_of_transformers(embedded, generator, fields):
    """What is drawn from the scores is theirs if the scores are; that draws follow them is tested elsewhere (test_distribution)."""
    pair, prompts = embedded
    asked = {
        "do_sample": True,
        "output_scores": True,
        "max_new_tokens": 1 + 2 * ("min_new_tokens" in fields),
        "eos_token_id": [2],
        **fields,
    }
    for prompt, found in zip(prompts, generator.generate(prompts, **asked), strict=True):
        theirs = transformers_output(
            pair, generator, prompt, **{"do_sample": True, "max_new_tokens": asked["max_new_tokens"], **fields}
        ).scores[0][0]
        np.testing.assert_allclose(
            jax.nn.log_softmax(found.scores[0]), torch.log_softmax(theirs, -1).numpy(), atol=1e-4, rtol=0, err_msg=str(fields)
        )
