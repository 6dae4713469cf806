"""Figures show every node once, and nothing covers anything else."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.patches import FancyBboxPatch

from reanchor_jax.bench.figures import draw_trie
from reanchor_jax.decoding.attach import Paths
from reanchor_jax.decoding.trie import merge
from reanchor_jax.decoding.walk import Walk

_NAMES = ["baseline", "d = 1", "d = 2", "d = 3"]
_SITES = np.array([[0, 1, 1, -1]])


def _trie():
    """7 6 5 4 with 7 6 8 9 3, 7 6 5 2 2 2 and, longer than the baseline, 7 6 5 4 1."""
    tokens = jnp.array([[[7, 6, 5, 4, 0, 0], [7, 6, 8, 9, 3, 0], [7, 6, 5, 2, 2, 2], [7, 6, 5, 4, 1, 0]]], jnp.int32)
    return merge(Paths(tokens=tokens, lengths=jnp.array([[4, 5, 6, 5]], jnp.int32)), num_nodes=13)


def _walk_to_depth_2():
    """The target says 6, then 8, then 10: nodes 0, 1 and the first of the first shifted block are walked."""
    says = np.full((1, 13), 11)
    says[0, [0, 1, 4]] = [6, 8, 10]
    return says, Walk(nodes=np.array([[0, 1, 4, 0, 0, 0, 0]]), num_emitted=np.array([3]), finish=np.array([0]))


def _label(token):
    return "$" * int(token)  # as wide as its number, and a sign that matplotlib would read as mathematics


def _boxes(figure):
    boxes = [patch.get_window_extent() for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return boxes, [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]


def test_trie_is_drawn_with_every_token_site_and_path_name():
    figure = draw_trie(_trie(), _label, path_names=_NAMES, sites=_SITES)
    texts = [text.get_text() for text in figure.axes[0].texts]
    lengths = [len(text) for text in texts if set(text) == {"$"}]
    assert sorted(lengths) == sorted([7, 6, 5, 4, 8, 9, 3, 2, 2, 2, 1])
    assert "d = 1\nd = 2\n▼" in texts
    # the baseline's row goes on as the third shifted block's, so it carries that name
    assert sorted(text for text in texts if text in _NAMES) == ["d = 1", "d = 2", "d = 3"]


@pytest.mark.parametrize("is_walked", [False, True])
def test_nothing_in_a_trie_covers_anything_else(is_walked):
    says, walked = _walk_to_depth_2() if is_walked else (None, None)
    figure = draw_trie(_trie(), _label, path_names=_NAMES, sites=_SITES, target_tokens=says, walked=walked)
    boxes, texts = _boxes(figure)
    assert len(boxes) == 11 + (1 + 5 if is_walked else 2)  # nodes, bonus, legend
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for one, other in itertools.combinations(texts, 2):
        assert not one.overlaps(other)
    for extent in (*boxes, *texts):
        assert figure.bbox.fully_containsx(extent.x0)
        assert figure.bbox.fully_containsx(extent.x1)
        assert figure.bbox.fully_containsy(extent.y0)
        assert figure.bbox.fully_containsy(extent.y1)


def test_walk_fills_the_accepted_path_and_adds_the_bonus():
    says, walked = _walk_to_depth_2()
    figure = draw_trie(_trie(), _label, path_names=_NAMES, target_tokens=says, walked=walked)
    white = [text.get_text() for text in figure.axes[0].texts if text.get_color() == "white"]
    assert [len(text) for text in white if set(text) == {"$"}] == [7, 6, 8]
    dashed = [patch for patch in figure.axes[0].patches if patch.get_linestyle() == "--"]
    assert len(dashed) == 2  # the bonus and its entry in the legend


def test_walk_without_target_tokens_is_refused():
    _, walked = _walk_to_depth_2()
    with pytest.raises(ValueError, match="walked needs target_tokens"):
        draw_trie(_trie(), _label, path_names=_NAMES, walked=walked)
