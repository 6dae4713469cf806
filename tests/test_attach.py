"""Attachment against loops over lists."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from reanchor_jax.decoding.attach import Match, find_sites, make_paths, random_scores
from reanchor_jax.decoding.config import ATTACH_RULES
from reanchor_jax.decoding.sampling import row_keys

ROWS, BLOCKS, SLOTS = 41, 6, 5

find_jit = jax.jit(find_sites, static_argnames=("rule", "is_second_tried"))
make_jit = jax.jit(make_paths, static_argnames="extent")


def drawn(seed, *, vocab_size=4):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(vocab_size, size=(ROWS, BLOCKS, SLOTS)).astype(np.int32)
    counts = rng.integers(BLOCKS, size=ROWS)
    return blocks, np.arange(BLOCKS)[None] <= counts[:, None]


def match_of(blocks, is_block, *, seed=0):
    """Everything a rule may look at; second choices never equal the first."""
    rng = np.random.default_rng(seed)
    return Match(
        anchors=blocks[:, :, 0],
        is_block=is_block,
        offsets=rng.integers(1, 2 * SLOTS - 2, size=blocks.shape[:2]).astype(np.int32),
        continuations=blocks[:, :, 1:],
        seconds=(blocks[:, 0, 1:] + rng.integers(1, 3, size=(len(blocks), SLOTS - 1))).astype(np.int32) % 4,
        scores=rng.uniform(size=(*blocks.shape[:2], SLOTS)).astype(np.float32),
    )


@pytest.mark.parametrize(
    ("rule", "is_second_tried"),
    [(rule, False) for rule in ATTACH_RULES] + [(rule, True) for rule in ATTACH_RULES if not rule.startswith("original_offset")],
)
def test_sites_are_those_of_the_rule_written_over_lists(rule, is_second_tried):
    found = set()
    for seed in range(20):
        blocks, is_block = drawn(seed)
        match = match_of(blocks, is_block, seed=seed)
        sites = np.asarray(find_jit(blocks[:, 0], match, rule=rule, is_second_tried=is_second_tried))
        for row in range(ROWS):
            baseline = blocks[row, 0].tolist()
            seconds = match.seconds[row].tolist() if is_second_tried else None
            for index in range(1, BLOCKS):
                given = (blocks[row, index].tolist(), int(match.offsets[row, index]), rule, match.scores[row, index].tolist(), seconds)
                assert sites[row, index] == (oracle.find_site(baseline, *given) if is_block[row, index] else -1)
            found |= set(sites[row].tolist())
        assert (sites[:, 0] == 0).all()
    assert found == {-1, *range(SLOTS)}


def test_random_sites_depend_on_the_row_alone():
    keys = row_keys(jax.random.key(3), 2)
    scores = random_scores(keys, jnp.asarray([7, 9]), num_blocks=BLOCKS, block_size=SLOTS)
    alone = random_scores(keys[1:], jnp.asarray([9]), num_blocks=BLOCKS, block_size=SLOTS)
    np.testing.assert_array_equal(scores[1], alone[0])
    assert len(np.unique(scores)) == scores.size


def test_a_block_whose_anchor_is_the_current_anchor_stands_at_zero():
    blocks = np.repeat(np.asarray([[[7], [7], [5], [9], [3]]], np.int32), 4, axis=2)
    blocks[0, 0] = [7, 3, 7, 5]
    is_block = np.asarray([[True, True, True, True, False]])
    match = Match(blocks[:, :, 0], is_block, np.zeros((1, 5), np.int32), blocks[:, :, 1:], np.zeros((1, 3), np.int32), np.zeros((1, 5, 4)))
    assert find_jit(blocks[:, 0], match, rule="earliest").tolist() == [[0, 0, 3, -1, -1]]


def test_paths_are_baseline_prefixes_followed_by_blocks():
    rng = np.random.default_rng(3)
    for seed in range(20):
        blocks, _ = drawn(seed, vocab_size=50)
        sites = rng.integers(-1, SLOTS, size=(ROWS, BLOCKS)).astype(np.int32)
        sites[:, 0] = 0
        kept = np.where(sites < 0, 0, rng.integers(0, SLOTS + 1, size=(ROWS, BLOCKS))).astype(np.int32)
        paths = make_jit(blocks, sites, kept)
        inner, outer = (make_jit(blocks, sites, kept, extent=extent) for extent in ("in_block", "extension"))
        assert paths.tokens.shape == (ROWS, BLOCKS, 2 * SLOTS - 1)
        for row in range(ROWS):
            for index in range(BLOCKS):
                site, count = sites[row, index], kept[row, index]
                expected = [] if count == 0 else [*blocks[row, 0, :site].tolist(), *blocks[row, index, :count].tolist()]
                assert paths.lengths[row, index] == len(expected)
                assert paths.tokens[row, index].tolist() == expected + [0] * (2 * SLOTS - 1 - len(expected))
                assert inner.tokens[row, index, : inner.lengths[row, index]].tolist() == expected[:SLOTS]
                is_extending = index == 0 or (len(expected) > SLOTS and kept[row, 0] == SLOTS)
                extended = [*blocks[row, 0].tolist(), *expected[SLOTS:]] if index else expected
                assert outer.tokens[row, index, : outer.lengths[row, index]].tolist() == (extended if is_extending else [])


def test_the_papers_example_attaches_behind_the_matching_token():
    """Baseline a b c d; a block re-anchored on c continues behind a b."""
    a, b, c, d, e, f, g = range(1, 8)
    blocks = jnp.asarray([[[a, b, c, d], [c, e, f, g]]])
    match = Match(
        anchors=blocks[:, :, 0],
        is_block=jnp.ones((1, 2), bool),
        offsets=jnp.zeros((1, 2), jnp.int32),
        continuations=blocks[:, :, 1:],
        seconds=jnp.zeros((1, 3), jnp.int32),
        scores=jnp.zeros((1, 2, 4)),
    )
    sites = find_jit(blocks[:, 0], match, rule="earliest")
    paths = make_jit(blocks, sites, jnp.asarray([[4, 4]]))
    assert sites.tolist() == [[0, 2]]
    assert paths.tokens.tolist() == [[[a, b, c, d, 0, 0, 0], [a, b, c, e, f, g, 0]]]
    assert paths.lengths.tolist() == [[4, 6]]
