"""Write the two prompt sets on which tau of the embedded pair is told; a script, not a test.

    python tests/prompt_sets.py --stories STORIES.json --out DIR

In: a JSON list of stories, of which the last hundred never entered training.
Out: DIR/held_out.jsonl: the first 32 tokens of those hundred. DIR/own.jsonl: 60 different beginnings of 5 to 14 tokens that the target
    sampled itself; what it tells behind them is close to what its drafter was trained on.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from reanchor_jax import load_pair, pairs
from reanchor_jax.text import encode, load_tokenizer
from reanchor_jax.training.rollouts import roll_out

PAIR = "stories260k"
NUM_HELD_OUT, HELD_OUT_TOKENS = 100, 32
NUM_OWN, SHORTEST, LONGEST = 60, 5, 14


def main():
    parser = argparse.ArgumentParser(description="Write the held-out and the own prompts of the embedded pair.")
    parser.add_argument("--stories", type=Path, required=True, help="JSON list of texts")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(pairs.path(PAIR))
    target = load_pair(PAIR, dtype="float32").target
    begin = [tokenizer.bos_token_id]
    texts = roll_out(target, [begin] * 4 * NUM_OWN, length=LONGEST + 1, temperatures=[1.0] * 4 * NUM_OWN, seed=arguments.seed).tokens
    rng = np.random.default_rng(arguments.seed)
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=len(texts))
    own = list(dict.fromkeys(tuple(text[:length].tolist()) for text, length in zip(texts, lengths, strict=True)))[:NUM_OWN]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, prompts in (("held_out", held_out(arguments.stories)), ("own", own)):
        lines = [json.dumps({"id": f"{name}-{index}", "ids": list(prompt)}) for index, prompt in enumerate(prompts)]
        (arguments.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(lines)} prompts: {arguments.out / name}.jsonl")


def held_out(stories: Path) -> list[list[int]]:
    """The first tokens of the stories that never entered training."""
    tokenizer = load_tokenizer(pairs.path(PAIR))
    return [encode(tokenizer, story)[:HELD_OUT_TOKENS] for story in json.loads(stories.read_text(encoding="utf-8"))[-NUM_HELD_OUT:]]


if __name__ == "__main__":
    main()
