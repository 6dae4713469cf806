"""Show figures of a comparison: a table and an acceptance histogram in the terminal, a table in Markdown.

In: the dict that `compare.results` makes, or the one over benchmarks of `suite.write_summary`.
Out: text.
Source: the layout tau / speedup of ReAnchor's Table 2, the histogram of its Figure 2.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from reanchor_jax.bench.benchmarks import BENCHMARKS
from reanchor_jax.bench.compare import BASELINE, CHAIN
from reanchor_jax.bench.methods import temperature_name
from reanchor_jax.decoding.config import Arm

_SPEEDUP = "Speedup: seconds per token of autoregressive over the method's; prefill and compilation excluded."
_BAR = " ▏▎▍▌▋▊▉█"  # eighths of a character


def terminal_table(results: Mapping[str, Any]) -> str:
    """A line a method; tau is tokens per target pass, bonus included, averaged over prompts."""
    header = ["method", "tokens/s", "speedup", "tau", "passes", "ceiling", "identical output"]
    rows = [header, *_rows(results)]
    lines = _aligned(rows)
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join(lines)


def markdown_tables(results: Mapping[str, Any], *, title: str) -> str:
    """A table of tau / speedup, a table of the rest, and what they were measured on."""
    has_chain = any(figures.get("gain_over_chain") for figures in results["methods"].values())
    header = ["method", "τ / speedup", "τ pooled", "τ standard error", *(["τ over dflash"] if has_chain else [])]
    header += ["nodes", "shifted blocks", "plain"]
    lines = [f"# {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, figures in results["methods"].items():
        speedup = _number(results["speedup"][name], "{:.2f}x")
        cells = [name, f"{figures['tau']:.2f} / {speedup}", f"{figures['tau_pooled']:.2f}", f"{figures['tau_standard_error']:.2f}"]
        cells += ["" if name == BASELINE else _gain(figures)] if has_chain else []
        cells += [f"{figures['mean_nodes']:.1f}", f"{figures['mean_offsets']:.1f}", f"{figures['plain_rate']:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| method | tokens/s | speedup | τ | target passes | ceiling | identical output |", "|---|---|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(results)]
    lines += ["", "| method | rounds by accepted drafts: 0, 1, 2, … |", "|---|---|"]
    lines += [f"| {name} | {' '.join(map(str, figures['histogram']))} |" for name, figures in results["methods"].items()]
    lines += [
        "",
        *(["τ over dflash: paired by prompt, with the standard error of the mean difference."] if has_chain else []),
        "τ: tokens per target pass, bonus included, prefill token excluded, averaged over prompts (pooled: over passes).",
        "Nodes verified and shifted blocks drafted a pass, on average; the anchor is a node, the baseline no shifted block.",
        "Plain: share of passes that verify nothing and decode one token.",
        _SPEEDUP,
        "Ceiling: share of passes that accept every draft of a block.",
        _measured_on(results["environment"]),
    ]
    return "\n".join([*lines, *peer_lines(results), *divergence_lines(results), ""])


def benchmark_tables(summary: Mapping[str, Any], *, title: str) -> str:
    """Tau / speedup in the layout of the paper's Table 2: a table a temperature, a row a method, a column a benchmark, and the mean.

    summary: of `suite.write_summary`.
    """
    lines = [f"# {title}"]
    for temperature in summary["means"]:
        runs = [run for run in summary["runs"] if temperature_name(run["temperature"]) == temperature]
        header = ["method", *(BENCHMARKS[run["benchmark"]].title for run in runs), "mean"]
        lines += ["", f"Temperature = {temperature}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        for name, mean in summary["means"][temperature].items():
            cells = [_cell(run["methods"].get(name)) for run in runs]
            lines.append("| " + " | ".join([name, *cells, _cell(mean)]) + " |")
        skipped = [f" ({run['num_skipped']} left out)" if run["num_skipped"] else "" for run in runs]
        counts = [f"{run['num_prompts']}{told}" for run, told in zip(runs, skipped, strict=True)]
        lines.append("| " + " | ".join(["prompts", *counts, str(sum(run["num_prompts"] for run in runs))]) + " |")
    lines += [
        "",
        "τ / speedup. τ: tokens per target pass, bonus included, prefill token excluded, averaged over prompts.",
        _SPEEDUP,
        "Mean: over the benchmarks measured. Left out: prompts that the target cannot hold together with the new tokens.",
        *dict.fromkeys(_measured_on(run["environment"], has_date=False) for run in summary["runs"] if run["environment"]),
        *(
            f"{name} on {BENCHMARKS[run['benchmark']].title} at temperature {temperature_name(run['temperature'])}: "
            f"output differs, see {found.get('folder', run['folder'])}."
            for run in summary["runs"]
            for name, found in run["methods"].items()
            if not found["identical"]
        ),
        "",
    ]
    return "\n".join(lines)


def drafter_table(summary: Mapping[str, Any], *, title: str) -> str:
    """A row a drafter and method; for every temperature tau / speedup, target passes and tokens/s.

    summary: of `drafters.write_summary`.
    """
    temperatures = list(dict.fromkeys(run["temperature"] for run in summary["runs"]))
    figures = {(run["drafter"], run["temperature"]): run for run in summary["runs"]}
    header = [
        "drafter",
        "method",
        *(f"T = {temperature_name(value)}: {what}" for value in temperatures for what in ("τ / speedup", "passes", "tokens/s")),
    ]
    lines = [f"# {title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for drafter in dict.fromkeys(run["drafter"] for run in summary["runs"]):
        for method in (CHAIN, "reanchor"):
            cells = [drafter, "alone" if method == CHAIN else "+ ReAnchor"]
            for temperature in temperatures:
                run = figures.get((drafter, temperature))
                found = None if run is None else run["methods"].get(method)
                if run is None or found is None:
                    cells += ["-"] * 3
                    continue
                cells += [_cell({"tau": found["tau"], "speedup": run["speedup"][method]}), f"{found['target_passes']:,}"]
                cells.append(_number(found["tokens_per_second"], "{:,.0f}"))
            lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "τ: tokens per target pass, bonus included, prefill token excluded, averaged over prompts.",
        _SPEEDUP,
        *dict.fromkeys(_measured_on(run["environment"], has_date=False) for run in summary["runs"]),
        *(
            f"{run['drafter']} at temperature {temperature_name(run['temperature'])}: output differs from plain decoding's."
            for run in summary["runs"]
            if not run["identical"]
        ),
        "",
    ]
    return "\n".join(lines)


def profile_table(num_rows: int, contexts: Sequence[int], arms: Sequence[Arm], *, kept: Sequence[Sequence[Arm]]) -> str:
    """A line an arm: milliseconds of a pass with its draft at the first and last context, and tokens a row, at temperature 0 and 1.

    kept: arms that rounds pick from at the two temperatures; they are marked.
    """
    ends = sorted({0, len(contexts) - 1})
    header = ["arm", "nodes", *(f"ms at {contexts[end]}, T={t}" for t in (0, 1) for end in ends), "tokens T=0", "T=1", "picked at T ="]
    rows = [header]
    for arm in arms:
        name = {0: "plain", 1: "chain" if arm.is_chain else "tree"}.get(arm.num_blocks, f"tree of {arm.num_blocks} blocks")
        marks = [str(t) for t, mine in enumerate(kept) if arm.kind in {one.kind for one in mine}]
        costs = [f"{1e3 * arm.seconds[index][end]:.3f}" for index in (0, 1) for end in ends]
        rows.append([name, str(arm.num_nodes), *costs, *(f"{value:.2f}" for value in arm.tokens), ", ".join(marks)])
    return "\n".join([f"{num_rows} row{'s' if num_rows > 1 else ''}", *_aligned(rows)])


def cores(environment: Mapping[str, Any]) -> str:
    """The number of cores in words."""
    return f"{environment['cores']} core{'s' if environment['cores'] != 1 else ''}"


def peer_lines(results: Mapping[str, Any]) -> list[str]:
    """A line a peer: its figures, and ours over them; none if there were no peers."""
    lines = []
    for name, found in results.get("peers", {}).items():
        told = f"peer {name}: {_number(found['tokens_per_second'], '{:,.0f}')} tokens/s, τ {found['tau']:.2f}"
        if found["ratio"] is not None:
            told += f"; our {found['counterpart']} makes {found['ratio']:.2f} times that"
        told += "; the same tokens" if found["identical"] else f"; other tokens for {len(found['divergences'])} prompts"
        lines.append(told)
    return lines


def divergence_lines(results: Mapping[str, Any]) -> list[str]:
    """A line for every output that differs from autoregressive; none if all are identical."""
    return [
        f"{name}, prompt {found['prompt']}: differs from autoregressive at token {found['index']}, "
        f"where the target's first choice leads its second by {found['margin']:.2g}."
        for name, figures in results["methods"].items()
        for found in figures["divergences"]
    ]


def histograms(results: Mapping[str, Any], names: Sequence[str], *, block_size: int, width: int = 80) -> str:
    """Share of target passes by accepted drafts, methods side by side.

    The last line, the ceiling, is the passes that accept at least a whole block.
    """
    column = (width - 5) // len(names) - 2
    columns = [shares(results["methods"][name]["histogram"], block_size=block_size) for name in names]
    largest = max(map(max, columns)) or 1.0
    lines = ["     " + "  ".join(name[:column].ljust(column) for name in names).rstrip()]
    for bin_ in range(block_size):
        cells = [f"{_bar(share[bin_] / largest, column - 6)} {share[bin_]:5.1%}".ljust(column) for share in columns]
        label = f"{bin_:3d}  " if bin_ < block_size - 1 else f"{bin_:2d}+  "
        lines.append(label + "  ".join(cells).rstrip())
    return "\n".join(lines)


def shares(histogram: Sequence[int], *, block_size: int) -> list[float]:
    """Share of target passes that accept 0, 1, ... drafts; the last, the ceiling, is of those that accept block_size - 1 or more."""
    counts = [*histogram[: block_size - 1], sum(histogram[block_size - 1 :])]
    return [count / max(sum(counts), 1) for count in counts]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of equally wide columns, the first aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _bar(fraction: float, width: int) -> str:
    eighths = round(fraction * width * 8)
    full, rest = divmod(eighths, 8)
    return (_BAR[8] * full + (_BAR[rest] if rest else "")).ljust(width)


def _rows(results: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            _number(figures["tokens_per_second"], "{:,.0f}"),
            _number(results["speedup"][name], "{:.2f}x"),
            f"{figures['tau']:.2f}",
            f"{figures['target_passes']:,}",
            "-" if name == "autoregressive" else f"{figures['ceiling_rate']:.1%}",
            "(reference)" if name == "autoregressive" else "yes" if figures["identical"] else f"NO, {len(figures['divergences'])} differ",
        ]
        for name, figures in results["methods"].items()
    ]


def _cell(figures: Mapping[str, Any] | None) -> str:
    """Tau / speedup, as far as there are such."""
    if figures is None or figures["tau"] is None:
        return "-"
    return f"{figures['tau']:.2f} / {_number(figures['speedup'], '{:.2f}x')}"


def _measured_on(environment: Mapping[str, Any], *, has_date: bool = True) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    date = f", {environment['date']}" if has_date else ""
    return f"Measured on {environment['device']}, {cores(environment)}, {environment['dtype']}, {versions}{date}."


def _gain(figures: Mapping[str, Any]) -> str:
    gain = figures.get("gain_over_chain")
    return "-" if gain is None else f"{gain['mean']:+.2f} ± {gain['standard_error']:.2f} ({gain['relative']:+.1%})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
