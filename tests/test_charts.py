"""Charts show the figures they are given, and are written whole."""

import json

import numpy as np
import pytest

from reanchor_jax.bench.charts import draw_budgets, draw_costs, draw_histograms, draw_training, write_charts, write_training_chart


def figures(tau, nodes, histogram, rate):
    return {
        "tau": tau,
        "tau_pooled": tau,
        "tau_standard_error": 0.1,
        "mean_nodes": nodes,
        "histogram": histogram,
        "tokens": 900,
        "tokens_per_second": rate,
        "target_passes": 300,
    }


RESULTS = {
    "methods": {
        "autoregressive": figures(1.0, 1.0, [9], 100.0),
        "dflash": figures(3.0, 4.0, [1, 2, 3, 4], 200.0),
        "ddtree:num_nodes=16": figures(4.5, 16.0, [1, 1, 1, 2, 5], 150.0),
        "ddtree": figures(4.0, 8.0, [5, 0, 0, 5], 300.0),
    }
}


def test_histograms_hold_shares_and_everything_past_the_block_is_the_ceiling():
    panels = draw_histograms(RESULTS, block_size=4).axes
    heights = [[bar.get_height() for bar in panel.patches] for panel in panels]
    assert heights == [[10, 20, 30, 40], [10, 10, 10, 70], [50, 0, 0, 50]]
    assert [panel.get_title().splitlines()[-1] for panel in panels] == [
        "τ 3.00, ceiling 40.0 %",
        "τ 4.50, ceiling 70.0 %",
        "τ 4.00, ceiling 50.0 %",
    ]


def test_points_of_one_method_are_joined_by_rising_nodes():
    (axes,) = draw_budgets(RESULTS).axes
    lines = {container.get_label(): container.lines[0].get_xydata() for container in axes.containers}
    np.testing.assert_array_equal(lines["dflash"], [[4, 3]])
    np.testing.assert_array_equal(lines["ddtree"], [[8, 4], [16, 4.5]])


def test_a_rounds_cost_is_told_beside_what_it_brings():
    (axes,) = draw_costs(RESULTS).axes
    # 900 tokens at 200 a second in 300 passes
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([30, 15, 20, 10])
    assert [text.get_text().strip() for text in axes.texts][1] == "3.00 tokens, 200/s"
    assert axes.lines[0].get_xdata() == [10, 10]


def test_charts_are_written_as_files(tmp_path):
    written = write_charts(RESULTS, tmp_path, block_size=4)
    assert (
        sorted(path.name for path in tmp_path.iterdir())
        == ["budgets.png", "costs.png", "histograms.png"]
        == sorted(p.name for p in written)
    )
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)
    assert write_charts({"methods": {"autoregressive": RESULTS["methods"]["autoregressive"]}}, tmp_path, block_size=1) == []


def test_a_method_that_decoded_nothing_has_no_cost():
    nothing = {"methods": {**RESULTS["methods"], "reanchor": {**figures(0.0, 0.0, [0, 0, 0, 0], None), "target_passes": 0}}}
    assert [label.get_text() for label in draw_costs(nothing).axes[0].get_yticklabels()] == list(RESULTS["methods"])
    draw_histograms(nothing, block_size=4)


def test_a_training_run_shows_tau_and_loss_over_steps(tmp_path):
    log = [{"step": 10 * index, "tau": 1.0 + index, "tau_standard_error": 0.1, "loss": 5.0 - index} for index in range(1, 4)]
    tau, loss = draw_training(log).axes
    assert tau.lines[0].get_xydata().tolist() == [[10, 2], [20, 3], [30, 4]]
    assert loss.lines[0].get_xydata().tolist() == [[10, 4], [20, 3], [30, 2]]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    written = write_training_chart(tmp_path)
    assert written == tmp_path / "training.png"
    assert written.read_bytes().startswith(b"\x89PNG")
