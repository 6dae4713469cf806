"""Draw a round's trie.

In: a Trie and, once the target has seen it, its tokens and the Walk; everything is read on the host, one row at a time.
Out: a matplotlib Figure (matplotlib comes with the extras `bench` and `test` and is imported when a figure is drawn).
Source: the picture of ReAnchor's Figure 1, as a tree that grows to the right. All lengths are inches.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from reanchor_jax.decoding.trie import Trie
from reanchor_jax.decoding.walk import Walk

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# pale fill, dark edge
_BASELINE = ("#dbe9f6", "#1f5f99")
_SHIFTED = ("#fde3c8", "#b5541c")
_BONUS = ("#ffffff", "#2f7d32")
_GREY = "#777777"

_FONT, _SMALL = 8.0, 6.5  # points
_CHARACTER = 0.602 / 72  # width of a DejaVu Sans Mono character over its size in points
_BOX_HEIGHT, _PADDING, _GAP = 0.2, 0.05, 0.24
_LINE = 0.13  # height of a line of small text
_MARGIN = 0.1
_LEGEND_WIDTH = 6.8


class _Layout(NamedTuple):
    """Where a trie is drawn. Nodes are numbered as in the trie; a bonus comes last.

    parents, depths, rows: of each node. labels: its text.
    left, width: of each column (a depth), inches.
    """

    parents: list[int]
    depths: list[int]
    rows: list[int]
    labels: list[str]
    left: np.ndarray
    width: np.ndarray


def draw_trie(
    trie: Trie,
    labels: Callable[[int], str],
    *,
    path_names: Sequence[str],
    sites: Int[Array, "B M"] | None = None,
    target_tokens: Int[Array, "B N"] | None = None,
    walked: Walk | None = None,
    row: int = 0,
) -> "Figure":
    """Draw one row's trie, depth from left to right: baseline nodes blue, nodes of shifted blocks orange.

    labels: text of a token id. path_names: name of each path, written at the end of its branch; the baseline's first.
    sites: where each block attaches; their names are written above the baseline token. Blocks at -1 are left out.
    target_tokens: the target's token after each node, written under it in small type.
    walked: fills the accepted path, and adds the bonus (target_tokens is then needed) with a dashed edge.
    Raises ValueError for walked without target_tokens.
    """
    from matplotlib.figure import Figure

    if walked is not None and target_tokens is None:
        raise ValueError("walked needs target_tokens, to know the bonus; give both.")
    num_nodes = int(np.sum(trie.is_node[row]))
    paths: list[int] = np.asarray(trie.blocks)[row, :num_nodes].tolist()
    answers = [] if target_tokens is None else [labels(int(token)) for token in np.asarray(target_tokens)[row, :num_nodes]]
    accepted = _accepted(walked, row)
    layout = _lay_out(trie, labels, answers, accepted, num_nodes, row)
    attached = _names_by_site(sites, path_names, row)

    height = max(_BOX_HEIGHT + (_LINE if answers else 0) + 0.1, 0.3)
    above = max([0, *map(len, attached.values())]) * _LINE + 3 * _MARGIN + 0.25
    names_width = max(len(name) for name in path_names) * _SMALL * _CHARACTER
    width = float(layout.left[-1] + layout.width[-1]) + _GAP + names_width + _MARGIN
    size = (max(width, _LEGEND_WIDTH), above + height * (1 + max(layout.rows)) + 0.45)
    figure = Figure(figsize=size, dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, size[0]), ylim=(size[1] - above, -above))  # y grows downwards; the baseline's row is at 0
    axes.set_axis_off()
    # the bottom of the axes lies below the last row and the depths
    y = [height * index + _BOX_HEIGHT / 2 for index in layout.rows]

    for node in range(1, len(layout.labels)):
        is_bonus, is_taken = node >= num_nodes, node in accepted
        colour = _BONUS[1] if is_bonus else _colours(paths[node])[1] if is_taken else _GREY
        _draw_edge(axes, layout, y, node, colour=colour, is_thick=is_taken, is_dashed=is_bonus)
    for node, label in enumerate(layout.labels):
        is_bonus = node >= num_nodes
        colours = _BONUS if is_bonus else _colours(paths[node])
        _draw_box(axes, _middle(layout, node), y[node], label, colours, is_filled=node in accepted, is_dashed=is_bonus)
        if node < len(answers):
            axes.text(_middle(layout, node), y[node] + _BOX_HEIGHT / 2 + 0.02, answers[node], **_text(_SMALL, _GREY), ha="center", va="top")
    for node in _ends(layout):
        x = layout.left[layout.depths[node]] + layout.width[layout.depths[node]] + 0.06
        name, colour = ("bonus", _BONUS[1]) if node >= num_nodes else (path_names[paths[node]], _colours(paths[node])[1])
        axes.text(x, y[node], name, **_text(_SMALL, colour), va="center")
    for site, names in attached.items():
        x = layout.left[site] + layout.width[site] / 2
        axes.text(x, y[0] - _BOX_HEIGHT / 2 - 0.02, "\n".join([*names, "▼"]), **_text(_SMALL, _SHIFTED[1]), ha="center", va="bottom")
    _draw_depths(axes, layout, height * (1 + max(layout.rows)) + 0.1)
    _draw_legend(axes, 2 * _MARGIN - above, has_answers=bool(answers), has_walk=walked is not None)
    return figure


def _colours(path: int) -> tuple[str, str]:
    return _BASELINE if path == 0 else _SHIFTED


def _accepted(walked: Walk | None, row: int) -> list[int]:
    """Accepted nodes from the anchor on."""
    return [] if walked is None else np.asarray(walked.nodes)[row, : int(walked.num_emitted[row])].tolist()


def _names_by_site(sites, path_names: Sequence[str], row: int) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    if sites is not None:
        for name, site in list(zip(path_names, np.asarray(sites)[row].tolist(), strict=False))[1:]:
            if site >= 0:
                names.setdefault(site, []).append(name)
    return names


def _lay_out(trie: Trie, labels: Callable[[int], str], answers: list[str], accepted: list[int], num_nodes: int, row: int) -> _Layout:
    tokens, parents, depths = (np.asarray(x)[row, :num_nodes].tolist() for x in (trie.tokens, trie.parents, trie.depths))
    texts = [labels(token) for token in tokens]
    if accepted:
        parents, depths, texts = [*parents, accepted[-1]], [*depths, depths[accepted[-1]] + 1], [*texts, answers[accepted[-1]]]
    width = np.zeros((max(depths) + 1,))
    for depth, text in zip(depths, texts, strict=True):
        width[depth] = max(width[depth], _box_width(text))
    for depth, text in zip(depths, answers, strict=False):
        width[depth] = max(width[depth], len(text) * _SMALL * _CHARACTER)
    left = _MARGIN + np.concatenate([[0.0], np.cumsum(width + _GAP)[:-1]])
    return _Layout(parents=parents, depths=depths, rows=_rows(parents), labels=texts, left=left, width=width)


def _rows(parents: list[int]) -> list[int]:
    """Row of every node: its first child goes on in the row, the others open rows below it.

    The deepest branch comes first below its row, so no edge crosses another.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, next_row = [0] * len(parents), 0
    waiting = [0]  # nodes that open a row, the next one last
    while waiting:
        node, opened = waiting.pop(), []
        while True:
            rows[node] = next_row
            # the bonus has the highest number; it is opened last, which puts it right under its row
            opened += children[node][1:]
            if not children[node]:
                break
            node = children[node][0]
        waiting += opened
        next_row += 1
    return rows


def _ends(layout: _Layout) -> list[int]:
    """The last node of every row."""
    ends: dict[int, int] = {}
    for node, row in enumerate(layout.rows):
        if row not in ends or layout.depths[node] > layout.depths[ends[row]]:
            ends[row] = node
    return list(ends.values())


def _middle(layout: _Layout, node: int) -> float:
    return float(layout.left[layout.depths[node]] + layout.width[layout.depths[node]] / 2)


def _box_width(label: str) -> float:
    return max(len(label) * _FONT * _CHARACTER + 2 * _PADDING, 0.16)


def _text(size: float, colour: str) -> dict:
    # parse_math: a token may be a dollar sign
    return {"fontsize": size, "color": colour, "family": "DejaVu Sans Mono", "parse_math": False}


def _draw_edge(axes: "Axes", layout: _Layout, y: list[float], node: int, *, colour: str, is_thick: bool, is_dashed: bool) -> None:
    parent = layout.parents[node]
    start = _middle(layout, parent) + _box_width(layout.labels[parent]) / 2
    end = _middle(layout, node) - _box_width(layout.labels[node]) / 2
    turn = layout.left[layout.depths[node]] - _GAP / 2
    axes.plot(
        [start, turn, turn, end],
        [y[parent], y[parent], y[node], y[node]],
        color=colour,
        linewidth=2.2 if is_thick else 0.8,
        linestyle="--" if is_dashed else "-",
        solid_joinstyle="round",
        zorder=2 if is_thick else 1,
    )


def _draw_box(
    axes: "Axes", middle: float, y: float, label: str, colours: tuple[str, str], *, is_filled: bool = False, is_dashed: bool = False
) -> None:
    from matplotlib.patches import FancyBboxPatch

    pale, dark = colours
    width = _box_width(label)
    axes.add_patch(
        FancyBboxPatch(
            (middle - width / 2, y - _BOX_HEIGHT / 2),
            width,
            _BOX_HEIGHT,
            boxstyle="round,pad=0,rounding_size=0.04",
            facecolor=dark if is_filled else pale,
            edgecolor=dark,
            linewidth=1.4 if is_filled or is_dashed else 0.8,
            linestyle="--" if is_dashed else "-",
            zorder=3,
        )
    )
    axes.text(middle, y, label, **_text(_FONT, "white" if is_filled else dark), ha="center", va="center", zorder=4)


def _draw_depths(axes: "Axes", layout: _Layout, y: float) -> None:
    end = layout.left[-1] + layout.width[-1]
    axes.plot([layout.left[0], end], [y, y], color=_GREY, linewidth=0.6)
    for depth, (left, width) in enumerate(zip(layout.left, layout.width, strict=True)):
        axes.text(left + width / 2, y + 0.04, str(depth), **_text(_SMALL, _GREY), ha="center", va="top")
    axes.text(layout.left[0], y + 0.04 + _LINE, "depth (tokens after the anchor)", **_text(_SMALL, _GREY), va="top")


def _draw_legend(axes: "Axes", y: float, *, has_answers: bool, has_walk: bool) -> None:
    entries = [("baseline block", _BASELINE, False, False), ("shifted block", _SHIFTED, False, False)]
    if has_walk:
        entries += [("accepted", _BASELINE, True, False), ("accepted", _SHIFTED, True, False), ("bonus", _BONUS, False, True)]
    x = _MARGIN
    for label, colours, is_filled, is_dashed in entries:
        _draw_box(axes, x + _box_width(label) / 2, y, label, colours, is_filled=is_filled, is_dashed=is_dashed)
        x += _box_width(label) + 0.1
    if has_answers:
        axes.text(x + 0.05, y, "under a box: the target's own next token there", **_text(_SMALL, _GREY), va="center")
