"""Charts of a comparison (acceptance histograms, tau against nodes, what a round costs), of benchmarks and of a training run.

In: the dict that `compare.results` makes; that of `suite.write_summary`; the log of a run.
Out: matplotlib Figures, or PNG files of them (matplotlib comes with the extra `bench` and is imported when a chart is drawn).
Source: ReAnchor's Figure 2 for the histograms; budgets as in DDTree's (arXiv 2604.12989).
"""

import importlib.util
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reanchor_jax.bench.benchmarks import BENCHMARKS
from reanchor_jax.bench.compare import BASELINE
from reanchor_jax.bench.methods import temperature_name
from reanchor_jax.bench.tables import shares
from reanchor_jax.text import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1f5f99", "#b5541c", "#2f7d32", "#7b4fa0", "#a08020", "#3a8f8f", "#a03050", "#555555")


def draw_histograms(results: Mapping[str, Any], *, block_size: int) -> "Figure":
    """Share of target passes by accepted drafts, a panel a method; the ceiling, passes that accept a whole block or more, is the last bar.

    block_size: tokens of a drafted block, anchor included.
    """
    names = _drafting(results)
    figure = _figure(width=max(2.2 * len(names), 3.2), height=2.6)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        percents = [100 * share for share in shares(results["methods"][name]["histogram"], block_size=block_size)]
        panel.bar(range(block_size), percents, color=[_colour(results, name)] * (block_size - 1) + ["#222222"])
        title = name.replace(":", "\n")
        panel.set_title(f"{title}\nτ {results['methods'][name]['tau']:.2f}, ceiling {percents[-1]:.1f} %", fontsize=8)
        panel.set_xlabel("accepted drafts (dark: all, or more)", fontsize=8)
        _clean(panel)
    panels[0].set_ylabel("% of target passes", fontsize=8)
    return figure


def draw_budgets(results: Mapping[str, Any]) -> "Figure":
    """Tau against verified nodes a round, with standard errors; points that differ in num_nodes alone are joined."""
    groups: dict[str, list[str]] = {}
    for name in _drafting(results):
        groups.setdefault(re.sub(":num_nodes=[0-9]+", "", name), []).append(name)
    figure = _figure(width=5.0, height=3.4)
    axes = figure.subplots()
    for group, names in groups.items():
        points = sorted((results["methods"][name]["mean_nodes"], name) for name in names)
        found = [results["methods"][name] for _, name in points]
        axes.errorbar(
            [nodes for nodes, _ in points],
            [figures["tau"] for figures in found],
            yerr=[figures["tau_standard_error"] for figures in found],
            color=_colour(results, names[0]),
            marker="o",
            markersize=4,
            linewidth=1.2,
            capsize=2,
            label=group,
        )
    axes.set_xscale("log", base=2)
    ends = np.log2([results["methods"][name]["mean_nodes"] for names in groups.values() for name in names])
    axes.set_xlim(2 ** (np.floor(ends.min()) - 0.1), 2 ** (np.ceil(ends.max()) + 0.1))  # a power of two, which gets a number, on each side
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("nodes verified a round, anchor included", fontsize=8)
    axes.set_ylabel("τ (tokens a target pass)", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    _clean(axes)
    return figure


def draw_costs(results: Mapping[str, Any]) -> "Figure":
    """Milliseconds a round and the tokens it brings, a bar a method; the dashed line is what plain decoding takes for a token.

    Of rounds of one row: with a batch, the time of the batch is shared out among its rows.
    """
    names = [name for name, figures in results["methods"].items() if figures["tokens_per_second"]]
    figure = _figure(width=5.0, height=0.9 + 0.3 * len(names))
    axes = figure.subplots()
    for place, name in enumerate(names):
        figures = results["methods"][name]
        seconds = figures["tokens"] / figures["tokens_per_second"] / figures["target_passes"]
        axes.barh(place, 1e3 * seconds, color=_colour(results, name))
        axes.text(
            1e3 * seconds,
            place,
            f"  {figures['tau_pooled']:.2f} tokens, {figures['tokens_per_second']:,.0f}/s",
            va="center",
            fontsize=7,
        )
    plain = results["methods"][BASELINE]["tokens_per_second"]
    if plain:
        axes.axvline(1e3 / plain, color="#222222", linestyle="--", linewidth=0.8, label="plain decoding, a token")
        figure.legend(fontsize=7, frameon=False, loc="outside upper right")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.45)
    axes.set_xlabel("milliseconds a round\n(beside the bar: tokens a round, tokens a second)", fontsize=8)
    _clean(axes)
    return figure


def write_charts(results: Mapping[str, Any], folder: Path, *, block_size: int) -> list[Path]:
    """Write the charts as PNG files and return their paths; none without matplotlib, or without a method that drafts."""
    if not has_matplotlib() or not _drafting(results):
        return []
    charts = {
        "histograms": draw_histograms(results, block_size=block_size),
        "budgets": draw_budgets(results),
        "costs": draw_costs(results),
    }
    return [_write(figure, folder / f"{name}.png") for name, figure in charts.items()]


def draw_taus(summary: Mapping[str, Any]) -> "Figure":
    """Tau with its standard error, a bar a method that drafts, a group a benchmark or a drafter, a panel a temperature.

    summary: of `suite.write_summary` or `drafters.write_summary`.
    """
    runs = [run for run in summary["runs"] if _drafting(run)]
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    everything = {"methods": {name: None for run in runs for name in run["methods"]}}
    names = _drafting(everything)
    num_columns = max(sum(run["temperature"] == temperature for run in runs) for temperature in temperatures)
    figure = _figure(width=max(1.6 + num_columns * (0.35 + 0.2 * len(names)), 4.0), height=0.5 + 2.2 * len(temperatures))
    panels = figure.subplots(len(temperatures), 1, squeeze=False)[:, 0]
    width = 0.8 / len(names)
    for panel, temperature in zip(panels, temperatures, strict=True):
        mine = [run for run in runs if run["temperature"] == temperature]
        for index, name in enumerate(names):
            found = {place: run["methods"][name] for place, run in enumerate(mine) if run["methods"].get(name, {}).get("tau") is not None}
            panel.bar(
                [place + (index - (len(names) - 1) / 2) * width for place in found],
                [figures["tau"] for figures in found.values()],
                width=width,
                yerr=[figures["tau_standard_error"] for figures in found.values()],
                error_kw={"linewidth": 0.8, "capsize": 1.5, "ecolor": "#222222"},
                color=_colour(everything, name),
                label=name,
            )
        panel.set_xticks(range(len(mine)), [run["drafter"] if "drafter" in run else BENCHMARKS[run["benchmark"]].title for run in mine])
        panel.set_title(f"temperature {temperature_name(temperature)}", fontsize=8)
        panel.set_ylabel("τ (tokens a target pass)", fontsize=8)
        _clean(panel)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=7, frameon=False, loc="outside upper center", ncols=min(len(names), 4))
    return figure


def write_tau_chart(summary: Mapping[str, Any], path: Path) -> Path | None:
    """Draw the taus of a summary; None without matplotlib, or without a method that drafts."""
    if not has_matplotlib() or not any(_drafting(run) for run in summary["runs"]):
        return None
    return _write(draw_taus(summary), path)


def draw_training(log: Sequence[Mapping[str, Any]]) -> "Figure":
    """Tau by decoding over steps, with standard errors, and the smoothed loss on the right; log: lines of a run's log.jsonl."""
    figure = _figure(width=5.0, height=3.0)
    axes = figure.subplots()
    steps = [line["step"] for line in log]
    axes.errorbar(
        steps,
        [line["tau"] for line in log],
        yerr=[line["tau_standard_error"] for line in log],
        color=_COLOURS[0],
        marker="o",
        markersize=3,
        linewidth=1.2,
        capsize=2,
    )
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("τ on held-out texts, tokens a pass", fontsize=8, color=_COLOURS[0])
    losses = axes.twinx()
    losses.plot(steps, [line["loss"] for line in log], color=_COLOURS[1], linewidth=1.0)
    losses.set_ylabel("loss, smoothed", fontsize=8, color=_COLOURS[1])
    losses.tick_params(labelsize=7)
    _clean(axes)
    return figure


def write_training_chart(folder: Path) -> Path | None:
    """Draw the log of a training run beside it, as training.png; None without matplotlib, and for a run that was never evaluated."""
    if not has_matplotlib() or not (folder / "log.jsonl").is_file():
        return None
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return _write(draw_training([json.loads(line) for line in lines]), folder / "training.png")


def has_matplotlib() -> bool:
    """Whether charts can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def _write(figure: "Figure", path: Path) -> Path:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_bytes(path, image.getvalue())
    return path


def _drafting(results: Mapping[str, Any]) -> list[str]:
    return [name for name in results["methods"] if name != BASELINE]


def _colour(results: Mapping[str, Any], name: str) -> str:
    """The colour of a method, the same in every chart of these results."""
    return _COLOURS[list(results["methods"]).index(name) % len(_COLOURS)]


def _figure(*, width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor="white", layout="constrained")


def _clean(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)
