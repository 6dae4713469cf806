"""Texts through a pair: the core's tokens, streamed and stopped as transformers does; every field honoured, or refused by name."""

import asyncio

import jax
import numpy as np
import pytest
import transformers
from lossless import BEST
from situations import CACHE_LENGTH, flat, small_models
from tiny_text import VOCAB_SIZE, tokenizer_files

from reanchor_jax import autoregress, make_sampling
from reanchor_jax.generation import _MACHINERY, _NEUTRAL, _WITHOUT_MEANING, HONOURED, read_request
from reanchor_jax.generator import Generator
from reanchor_jax.streaming import Follower
from reanchor_jax.text import encode, load_tokenizer

_TEXT = "a naïve 猫 sat; 🦊  ran.\n\nThe end of 猫猫"
NEW = 37


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    """A pair whose drafts are sometimes right, writing bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if enable_thinking %}!{% endif %}"
    return Generator(flat(small_models(3, vocab_size=VOCAB_SIZE)), tokenizer=tokenizer, config=BEST)


def ask(generator, prompt, **fields):
    return generator.generate(prompt, **{"max_new_tokens": NEW, "do_sample": True, "eos_token_id": [], "seed": 5, **fields})


def test_two_prompts_get_what_plain_decoding_gives_with_the_same_keys(generator):
    texts = ["a cat", "Once upon a mat"]
    ids = [encode(generator.tokenizer, text) for text in texts]
    tokens = np.zeros((2, max(map(len, ids))), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    fields = {"temperature": 0.8, "top_p": 0.9, "top_k": 0}
    plain = autoregress(
        generator.models,
        tokens,
        np.asarray([len(prompt) for prompt in ids]),
        jax.random.key(5),
        config=BEST,
        sampling=make_sampling(2, **fields),
        max_new_tokens=NEW,
    )
    for row, found in enumerate(ask(generator, texts, **fields)):
        assert (found.prompt_ids, found.token_ids) == (ids[row], plain.tokens[row].tolist())
        np.testing.assert_allclose(found.log_probs, plain.log_probs[row], atol=1e-4, rtol=0)
        np.testing.assert_allclose(found.processed_log_probs, plain.processed_log_probs[row], atol=1e-4, rtol=0)
        assert sum(found.acceptance_lengths) == NEW - 1
        assert found.text == generator.tokenizer.decode(found.token_ids, skip_special_tokens=True)
        assert found.finish_reason == "length"


def test_pieces_join_to_the_text_in_every_form(generator):
    alone = ask(generator, "a cat")
    given = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": [], "seed": 5}
    assert "".join(generator.stream("a cat", **given)) == alone.text

    async def gather():
        whole = generator.generate_async("a cat", **given)
        return "".join([piece async for piece in generator.stream_async("a cat", **given)]), (await whole).text

    assert asyncio.run(gather()) == (alone.text, alone.text)


@pytest.mark.slow
def test_pieces_of_several_prompts_join_to_their_texts(generator):
    both = ["", ""]
    given = {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": [], "seed": 5}
    for row, piece in generator.stream_batch(["a cat", "Once"], **given):
        both[row] += piece
    assert both == [found.text for found in ask(generator, ["a cat", "Once"])]


def test_a_streamer_is_given_the_prompt_and_then_every_token_once(generator):
    class Recorder(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.chunks, self.has_ended = [], False

        def put(self, value):
            self.chunks.append(value.tolist())

        def end(self):
            self.has_ended = True

    recorder = Recorder()
    found = ask(generator, "a cat", streamer=recorder)
    assert recorder.chunks[0] == found.prompt_ids
    assert [token for chunk in recorder.chunks[1:] for token in chunk] == found.token_ids
    assert max(map(len, recorder.chunks[1:])) > 1
    assert recorder.has_ended
    iterator = transformers.TextIteratorStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ask(generator, "a cat", streamer=iterator)
    assert "".join(iterator) == found.text


def test_nothing_leaks_behind_a_stop_string_that_spans_rounds(generator):
    """sgl-project/sglang#23802, vllm-project/vllm#47616, snowflakedb/ArcticInference#161"""
    whole = ask(generator, "a cat")
    for first in range(2, NEW - 4, 7):
        stop = generator.tokenizer.decode(whole.token_ids[first : first + 3], skip_special_tokens=True)
        if "\ufffd" in stop or not stop:
            continue
        found = ask(generator, "a cat", stop_strings=[stop, "never to be seen"])
        count = next(n for n in range(NEW + 1) if stop in generator.tokenizer.decode(whole.token_ids[:n], skip_special_tokens=True))
        assert found.token_ids == whole.token_ids[:count]
        assert found.text == whole.text[: whole.text.index(stop)]
        np.testing.assert_array_equal(found.log_probs, whole.log_probs[:count])
        assert found.finish_reason == "stop_string"


def test_a_text_does_not_end_by_its_length_where_a_stop_string_came_first(generator):
    """sgl-project/sglang#31599"""
    whole = ask(generator, "a cat")
    count, stop = next(
        (index + 1, piece)
        for index, piece in enumerate(generator.tokenizer.decode([token]) for token in whole.token_ids)
        if index > 3 and len(piece) == 1 and piece.isascii() and piece not in generator.tokenizer.decode(whole.token_ids[:index])
    )
    for length, reason in ((count - 1, "length"), (count, "stop_string"), (count + 1, "stop_string")):
        found = ask(generator, "a cat", stop_strings=stop, max_new_tokens=length)
        assert found.finish_reason == reason
        assert found.token_ids == whole.token_ids[: min(length, count)]
        assert stop not in found.text
    ended = ask(generator, "a cat", stop_strings=stop, eos_token_id=whole.token_ids[count - 1])
    assert (ended.token_ids, ended.finish_reason) == (whole.token_ids[:count], "stop_string")


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("stop", ["猫", "; 🦊", "\n\nThe", "a", "end of 猫猫", "naïve 猫 sat"])
def test_a_follower_stops_where_a_loop_over_tokens_does(generator, size, stop):
    tokens = encode(generator.tokenizer, _TEXT)
    prompt, tokens = tokens[:1], tokens[1:]
    text = [generator.tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
    expected = next(n for n in range(len(text)) if stop in text[n])
    follower, kept, pieces = Follower(generator.tokenizer, prompt, ["not here", stop]), 0, []
    for place in range(0, len(tokens), size):
        kept += follower.add(tokens[place : place + size])
        pieces.append(follower.take())
        assert _TEXT[: _TEXT.index(stop)].startswith("".join(pieces))  # no beginning of the stop string is ever shown
        if follower.is_stopped:
            break
    assert kept == expected
    assert follower.text == "".join(pieces) + follower.close() == _TEXT[: _TEXT.index(stop)]


def test_what_only_began_a_stop_string_is_shown_in_the_end(generator):
    follower = Follower(generator.tokenizer, [0], ["the end."])
    follower.add(encode(generator.tokenizer, "at the en")[1:])
    assert (follower.take(), follower.close()) == ("at ", "the en")


def test_log_probabilities_and_scores_are_there_and_right_for_every_token(generator):
    """vllm-project/vllm#34497, ggml-org/llama.cpp#27972, z-lab/dflash#39"""
    fields = {"output_scores": True, "output_logits": True, "suppress_tokens": [5], "bad_words_ids": [[9]], "top_k": 7, "temperature": 0.5}
    found = ask(generator, "a cat", **fields)
    assert found.scores.shape == found.logits.shape == (NEW, VOCAB_SIZE)
    at = np.arange(NEW), found.token_ids
    np.testing.assert_allclose(jax.nn.log_softmax(found.scores)[at], found.processed_log_probs, atol=1e-4)
    np.testing.assert_allclose(jax.nn.log_softmax(found.logits)[at], found.log_probs, atol=1e-4)
    assert np.isneginf(found.scores[:, [5, 9]]).all()
    assert (np.isfinite(found.scores).sum(-1) == 7).all()
    greedy = ask(generator, "a cat", do_sample=False, output_scores=True)
    assert (greedy.scores.argmax(-1) == greedy.token_ids).all()
    assert greedy.logits is None


def test_lengths_of_every_kind_bound_a_row(generator):
    stops = list(range(0, VOCAB_SIZE, 3))
    length = len(encode(generator.tokenizer, "a cat"))
    assert len(ask(generator, "a cat", max_new_tokens=None, max_length=length + 6).token_ids) == 6
    assert len(ask(generator, "a cat", max_new_tokens=6, max_length=99).token_ids) == 6
    assert len(ask(generator, "a cat", eos_token_id=stops, min_new_tokens=11).token_ids) > 11
    assert len(ask(generator, "a cat", eos_token_id=stops, min_length=length + 11).token_ids) > 11
    ended = ask(generator, "a cat", eos_token_id=stops)
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] in stops
    assert not set(ended.token_ids[:-1]) & set(stops)


@pytest.mark.slow
def test_sequences_of_one_prompt_have_keys_of_their_own(generator):
    found = ask(generator, "a cat", num_return_sequences=3)
    assert len({tuple(one.token_ids) for one in found}) == 3
    assert [one.token_ids for one in found] == [one.token_ids for one in ask(generator, ["a cat"] * 3)]


def test_conversations_go_through_the_template(generator):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "a cat"}]
    found = ask(generator, messages, thinking=True)
    assert generator.tokenizer.decode(found.prompt_ids, skip_special_tokens=True) == "[system]be[user]a cat!"
    ids = ask(generator, found.prompt_ids)
    assert ids.token_ids == found.token_ids


# a value of each field that asks for something
ASKING = {
    "cache_implementation": "static",
    "early_stopping": True,
    "num_assistant_tokens_schedule": "constant",
    "sequence_bias": [[[1], 2.0]],
}


def every_field():
    """Fields of GenerationConfig as transformers has them."""
    return sorted(vars(transformers.GenerationConfig()))


def test_every_field_of_a_generation_config_is_honoured_or_refused_by_name():
    for name in every_field():
        if name in HONOURED or name in _WITHOUT_MEANING:
            continue
        neutral = _NEUTRAL.get(name)
        value = ASKING.get(name, (not neutral) if isinstance(neutral, bool) else 3)
        with pytest.raises(ValueError, match=rf"{name}=.* is not honoured; honoured are"):
            read_request(None, {name: value}, of_model={}, stop_token_ids=())
        # what a model's own file says of how transformers is to run it changes no text
        if name not in _MACHINERY:
            with pytest.raises(ValueError, match=rf"{name}=.* generation_config.json"):
                read_request(None, {}, of_model={name: value}, stop_token_ids=())
        read_request(None, {name: neutral}, of_model={name: value}, stop_token_ids=())
    for name in _MACHINERY:
        read_request(None, {}, of_model={name: 3}, stop_token_ids=())


def test_what_nobody_sets_has_the_values_of_transformers():
    theirs = transformers.GenerationConfig._get_default_generation_params()
    request = read_request(None, {"do_sample": True}, of_model={}, stop_token_ids=(2,))
    assert request.sampling == {"min_p": 0.0} | {name: theirs[name] for name in ("temperature", "top_k", "top_p")}
    assert {name: theirs[name] for name in _NEUTRAL if name in theirs} == {name: _NEUTRAL[name] for name in _NEUTRAL if name in theirs}


def test_keywords_win_over_a_config_and_it_over_the_models_own():
    own = {"eos_token_id": [1, 106], "do_sample": True, "temperature": 0.6, "top_k": 20, "cache_implementation": "hybrid"}
    config = transformers.GenerationConfig(temperature=0.9, max_new_tokens=12)
    request = read_request(config, {"top_k": 5}, of_model=own, stop_token_ids=(2,))
    assert request.stop_token_ids == (1, 106)
    assert request.max_new_tokens == 12
    assert request.sampling == {"temperature": 0.9, "top_k": 5, "top_p": 1.0, "min_p": 0.0}
    assert read_request(None, {"do_sample": False}, of_model=own, stop_token_ids=()).sampling == {}
    assert read_request(None, {"eos_token_id": 7}, of_model=own, stop_token_ids=()).stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"temperature": 0.5}, "temperature would do nothing: give do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature must be more than 0 with do_sample=True; got 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must lie in"),
        ({"do_sample": 1}, "do_sample must be True or False; got 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1; got 0"),
        ({"eos_token_id": "x"}, "eos_token_id must hold token ids"),
        ({"stop_strings": [""]}, "stop_strings must be texts that are not empty"),
        ({"bad_words_ids": [[1, 2]]}, r"bad_words_ids may hold single tokens only, each as a list of one; got \[1, 2\]"),
        ({"max_length": 3}, r"leaves none of max_length \(3\)"),
        ({"max_new_tokens": 1000}, rf"exceed cache_length \({CACHE_LENGTH}\)"),
        ({"generation_config": 3}, "must be a transformers GenerationConfig"),
        ({"thinking": True}, "give the prompt as messages"),
        ({"num_beams": 4}, "num_beams=4 is not honoured"),
    ],
)
def test_a_request_that_cannot_be_kept_is_refused_before_anything_runs(generator, fields, rule):
    with pytest.raises(ValueError, match=rule):
        generator.generate("a cat", **fields)


@pytest.mark.parametrize(
    ("prompts", "rule"),
    [
        ([], "prompts is empty"),
        ("", "prompt 0: the prompt is empty"),
        (["a", ""], "prompt 1: the prompt is empty"),
        ([[]], "prompt 0: it is empty"),
        (3, "prompts must be a text, token ids, messages"),
        ([["a", "b"]], "prompt 0: it must be a text, token ids or messages; got str"),
        ([[{"role": "user"}]], "messages must have a role and a content each"),
        ([[VOCAB_SIZE]], "outside the target's vocabulary"),
    ],
)
def test_what_is_no_prompt_is_refused(generator, prompts, rule):
    with pytest.raises(ValueError, match=rule):
        generator.generate(prompts, max_new_tokens=3)


def test_text_is_not_asked_of_a_pair_without_tokenizer(generator):
    silent = Generator(generator.models, config=BEST)
    assert silent.generate([1, 2], max_new_tokens=3).text is None
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        silent.generate([1, 2], stop_strings="a")
    with pytest.raises(ValueError, match="no tokenizer to make text with"):
        next(silent.stream([1, 2]))
