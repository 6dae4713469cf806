"""Text room: a tokenizer trained here on a sentence; streaming, prompts files, whole files only."""

import json
import os
import threading

import pytest
from tiny_text import SENTENCE, tokenizer_files

from reanchor_jax.streaming import continuation, stream_text
from reanchor_jax.text import encode, load_tokenizer, read_prompts, read_texts, write_text

# two-, three- and four-byte characters, which the byte-level tokenizer cuts into pieces
_TEXT = "a naïve 猫 sat; 🦊  ran.\n\nThe end"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_no_token_of_a_round_is_lost_in_a_stream_and_no_character_broken(tokenizer, size, cut):
    """waybarrios/vllm-mlx#109, vllm-project/vllm#26027, #45678"""
    ids = encode(tokenizer, _TEXT)
    prompt, tokens = ids[:cut], ids[cut:]
    pieces = list(stream_text(tokenizer, prompt, [tokens[i : i + size] for i in range(0, len(tokens), size)]))
    assert tokenizer.decode(prompt, skip_special_tokens=True) + "".join(pieces) == _TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert continuation(tokenizer, prompt, tokens) == "".join(pieces)


def test_a_character_waits_for_its_last_byte(tokenizer):
    ids = encode(tokenizer, "猫")[1:]
    assert len(ids) == 3
    assert list(stream_text(tokenizer, [0], [ids[:1], ids[1:2], ids[2:]])) == ["猫"]
    assert list(stream_text(tokenizer, [0], [ids[:2]])) == ["\ufffd"]  # cut off in the middle: shown at the end


def test_special_tokens_are_no_text(tokenizer):
    assert encode(tokenizer, "a")[0] == 0
    assert continuation(tokenizer, encode(tokenizer, "a"), [0, *encode(tokenizer, " b"), 0]) == " b"


def test_no_tokenizer_means_no_text_but_a_clear_error(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert continuation(None, [1], [2]) is None
    with pytest.raises(ValueError, match="has no tokenizer"):
        encode(None, "a")


def test_a_damaged_tokenizer_names_its_directory(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(ValueError, match=f"tokenizer of {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("text", "rule"), [("", "is empty"), ("a\udc80", "not valid UTF-8")])
def test_text_that_cannot_be_a_prompt_is_refused(tokenizer, text, rule):
    with pytest.raises(ValueError, match=rule):
        encode(tokenizer, text)


def test_chat_needs_a_template_and_wraps_the_text_with_it(tokenizer):
    with pytest.raises(ValueError, match="no chat template"):
        encode(tokenizer, "a cat", is_chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    try:
        assert tokenizer.decode(encode(tokenizer, "a cat", is_chat=True), skip_special_tokens=True) == "[user] a cat[me]"
    finally:
        tokenizer.chat_template = None


def test_prompts_are_text_or_ids_with_a_name(tokenizer, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes("\ufeff".encode() + b'{"prompt": "a cat"}\n\n{"ids": [5, 7], "id": "x"}\r\n{"ids": [3], "id": 11}')
    prompts = read_prompts(file, tokenizer, vocab_size=300)
    assert [(prompt.id, prompt.text) for prompt in prompts] == [("0", "a cat"), ("x", None), ("11", None)]
    assert [prompt.ids for prompt in prompts] == [encode(tokenizer, "a cat"), [5, 7], [3]]
    assert read_prompts(file, tokenizer, vocab_size=300, limit=2) == prompts[:2]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"{", "line 2 is not valid JSON"),
        (b"[" * 100_000, "line 2 is not valid JSON"),
        (b"[1]", "line 2 must be a JSON object; got list"),
        (b"{}", "line 2 must hold either prompt .* neither"),
        (b'{"prompt": "a", "ids": [1]}', "line 2 must hold either prompt .* both"),
        (b'{"prompt": 3}', "line 2: prompt must be text; got 3"),
        (b'{"prompt": ""}', "line 2: the prompt is empty"),
        (b'{"prompt": "\\ud800"}', "line 2: the prompt is not valid UTF-8"),
        (b'{"prompt": "\xff"}', "line 2 is not UTF-8"),
        (b'{"ids": []}', "line 2: ids is empty"),
        (b'{"ids": "12"}', "line 2: ids must be a list of whole numbers"),
        (b'{"ids": [1, true]}', "line 2: ids must be a list of whole numbers"),
        (b'{"ids": [1.0]}', "line 2: ids must be a list of whole numbers"),
        (b'{"ids": [13]}', r"line 2: token id 13 lies outside the target's vocabulary 0\.\.12"),
        (b'{"ids": [-1]}', "line 2: token id -1"),
        (b'{"ids": [1], "id": [2]}', "line 2: id must be a string or a number"),
        (b'{"ids": [1], "id": "\\udc00"}', "line 2: id is not valid Unicode text"),
    ],
)
def test_a_bad_line_is_named_with_its_rule(tokenizer, tmp_path, line, rule):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"ids": [1]}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"prompts.jsonl {rule}"):
        read_prompts(file, tokenizer, vocab_size=13)


def test_a_file_without_prompts_is_refused(tokenizer, tmp_path):
    (tmp_path / "none.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(tmp_path / "none.jsonl", tokenizer, vocab_size=13)
    with pytest.raises(ValueError, match="holds no texts"):
        read_texts(tmp_path / "none.jsonl")


def test_texts_must_be_text(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"prompt": SENTENCE}) + "\n" + json.dumps({"ids": [1]}))
    with pytest.raises(ValueError, match=r"texts.jsonl line 2 must hold prompt"):
        read_texts(file)


def test_a_file_is_old_or_new_never_half(tmp_path):
    file = tmp_path / "out.txt"
    write_text(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_and_the_file_it_names_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/out.txt").write_text("old")
    for name, text in (("out.txt", "new"), ("missing.txt", "first")):
        (tmp_path / f"link to {name}").symlink_to(f"folder/{name}")
        write_text(tmp_path / f"link to {name}", text)
        assert (tmp_path / f"link to {name}").is_symlink()
        assert (tmp_path / "folder" / name).read_text() == text
    assert sorted(os.listdir(tmp_path / "folder")) == ["missing.txt", "out.txt"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_text(tmp_path / "loop", "new")
    assert (tmp_path / "loop").is_symlink()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_pipe_stays_a_pipe_and_gets_the_text(tmp_path, is_linked):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    write_text(tmp_path / ("link" if is_linked else "pipe"), "naïve")
    reader.join(20)
    assert got == ["naïve"]
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_name_as_long_as_a_name_can_be_is_written(tmp_path):
    write_text(tmp_path / ("x" * 255), "new")
    assert (tmp_path / ("x" * 255)).read_text() == "new"
