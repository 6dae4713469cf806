"""SmolLM2-135M-Instruct, converted by us, answers 20 chat questions as transformers does.

REANCHOR_SMOLLM2 names a Hugging Face directory of the model; REANCHOR_SMOLLM2_PROMPTS, if set, a JSONL file whose first 20 prompts replace
the questions below. Takes minutes on one core.
"""

import itertools
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from greedy import check_divergences, divergences, transformers_greedy

from reanchor_jax import DecodeConfig, autoregress, checkpoint
from reanchor_jax.convert.engine import convert
from reanchor_jax.text import encode, load_tokenizer, read_texts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SOURCE = os.environ.get("REANCHOR_SMOLLM2")
NEW_TOKENS = 64
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write three sentences about autumn.",
    "How many minutes are there in two and a half hours?",
    "Explain why the sky is blue to a child.",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' into Spanish and German.",
    "A train travels 180 kilometres in 2 hours. What is its average speed?",
    "Name five animals that live in the sea.",
    "Write a Python function that adds two numbers.",
    "What is the difference between a list and a tuple in Python?",
    "Tom has 12 apples and gives a third of them to Ann. How many are left?",
    "Who wrote Romeo and Juliet?",
    "Suggest a name for a small bakery and say why.",
    "List the planets of the solar system in order.",
    "Summarise the story of Cinderella in two sentences.",
    "What should I pack for a weekend in the mountains?",
    "Is 91 a prime number? Explain.",
    "Write a short poem about a river.",
    "How does a bicycle stay upright?",
    "What is photosynthesis?",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="REANCHOR_SMOLLM2 is unset; set it to a Hugging Face directory of SmolLM2-135M-Instruct"),
]


@pytest.fixture(scope="module", autouse=True)
def _optimised():
    """Undo what conftest does for tiny models: here running takes the time, not compiling."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Our directories of the model by dtype."""
    root = tmp_path_factory.mktemp("smollm2")
    return {name: convert(SOURCE, None, root / name, dtype=name, show_progress=False) for name in ("float32", "bfloat16")}


def test_conversion_keeps_every_value(converted):
    wide, narrow = (checkpoint.leaves(checkpoint.load(converted[name]).target) for name in ("float32", "bfloat16"))
    assert sum(leaf.size for leaf in wide.values()) == 134_515_008
    assert wide.keys() == narrow.keys()
    for name, leaf in wide.items():
        np.testing.assert_array_equal(np.asarray(leaf).astype(ml_dtypes.bfloat16), np.asarray(narrow[name]), err_msg=name)


def test_greedy_chat_answers_equal_transformers(converted):
    models, tokenizer = checkpoint.load(converted["float32"]), load_tokenizer(converted["float32"])
    questions = QUESTIONS
    if file := os.environ.get("REANCHOR_SMOLLM2_PROMPTS"):
        questions = tuple(itertools.islice(read_texts(Path(file)), len(QUESTIONS)))
    prompts = [encode(tokenizer, question, is_chat=True) for question in questions]
    stops = models.target.config.eos_token_ids
    lengths = np.asarray([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    result = autoregress(
        models,
        padded,
        lengths,
        jax.random.key(0),
        config=DecodeConfig.autoregressive(cache_length=int(lengths.max()) + NEW_TOKENS),
        max_new_tokens=NEW_TOKENS,
        stop_token_ids=stops,
    )
    ours = [np.asarray(result.tokens)[row, :count].tolist() for row, count in enumerate(np.asarray(result.lengths))]
    model = transformers.AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval()
    theirs = [transformers_greedy(model, prompt, max_new_tokens=NEW_TOKENS, stop_token_ids=stops) for prompt in prompts]
    found = divergences(model, prompts, theirs, ours)
    print(f"{sum(map(len, theirs))} tokens of {len(prompts)} answers; {len(found)} differ: {found}")
    check_divergences(found)
