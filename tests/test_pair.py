"""The embedded pair: a drafter bug never shows in the text, only in tau, so tau has floors of its own.

Held-out prompts are beginnings of stories that never entered training; they lie beside the project, not in it.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from prompt_sets import held_out

import reanchor_jax

STORIES = Path(__file__).parents[2] / "shared" / "data" / "corpora" / "tinystories.json"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"the held-out stories are not at {STORIES}")
NEW = 100
# a tenth below what was measured on the prompts used here; a head that is left out, or slots one place off, fall far below
FLOORS = {"dflash": 4.3, "domino": 5.65, "xpress": 4.9, "dspark": 4.65, "dblast": 4.4, "draft-opd": 4.4, "dbloom": 4.2, "dflare": 2.95}


@pytest.fixture(scope="module", autouse=True)
def optimised():
    """Thousands of tokens are decoded here, so the compiler's passes, left out elsewhere, pay."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def models():
    return reanchor_jax.load_pair("stories260k")


def taus(models, prompts, config) -> np.ndarray:
    lengths = np.full((len(prompts),), prompts.shape[1])
    result = reanchor_jax.generate(models, prompts, lengths, jax.random.key(0), config=config, max_new_tokens=NEW)
    return reanchor_jax.tau_per_prompt([result.info])


@needs_stories
def test_tau_on_held_out_stories_keeps_its_floors(models):
    """Of the chain, and of the tree that drafts both kinds of blocks; `test_embedded_pair` has a floor of the paper's paths."""
    prompts = np.asarray(held_out(STORIES)[:12], np.int32)
    chain = taus(models, prompts, reanchor_jax.DecodeConfig.dflash(cache_length=192))
    tree = taus(models, prompts, reanchor_jax.DecodeConfig.reanchor_tree(64, cache_length=192, block_buckets=(), node_buckets=()))
    assert chain.mean() > 3.6
    assert (tree / chain).mean() > 1.25


@needs_stories
@pytest.mark.slow
def test_every_drafter_of_the_pair_keeps_its_floor_and_reanchor_raises_it():
    prompts = np.asarray(held_out(STORIES)[:12], np.int32)
    assert {f"stories260k/{name}" for name in FLOORS} == {name for name in reanchor_jax.pairs.names() if "/" in name}
    for name, floor in FLOORS.items():
        models = reanchor_jax.load_pair(f"stories260k/{name}")
        chain = taus(models, prompts, reanchor_jax.DecodeConfig.dflash(cache_length=192)).mean()
        paper = taus(models, prompts, reanchor_jax.DecodeConfig.reanchor(cache_length=192, block_buckets=(), node_buckets=())).mean()
        assert chain > floor, name
        assert paper > 1.03 * chain, name


@needs_stories
@pytest.mark.slow
def test_tau_gains_over_the_chain_on_all_held_out_stories(models):
    prompts = np.asarray(held_out(STORIES), np.int32)
    chain = taus(models, prompts, reanchor_jax.DecodeConfig.dflash(cache_length=192))
    paper = taus(models, prompts, reanchor_jax.DecodeConfig.reanchor(cache_length=192))
    both = taus(models, prompts, reanchor_jax.DecodeConfig.reanchor(retain="both", cache_length=192))
    assert chain.mean() >= 3.6
    assert paper.mean() >= 1.08 * chain.mean()
    assert both.mean() >= 1.12 * chain.mean()
    for num_nodes, gain in ((32, 1.02), (64, 1.04)):
        marginal = taus(models, prompts, reanchor_jax.DecodeConfig.ddtree(num_nodes, cache_length=192))
        merged = taus(models, prompts, reanchor_jax.DecodeConfig.reanchor_tree(num_nodes, cache_length=192))
        assert merged.mean() >= gain * marginal.mean()


def test_the_pair_keeps_its_licence_beside_it():
    folder = reanchor_jax.pairs.path("stories260k")
    assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert "reanchor-jax train" in (folder / "README.md").read_text(encoding="utf-8")
