"""The script that is prepared for a GPU, in small on the CPU."""

import json

import jax
import pytest

from reanchor_jax import inspection, pairs
from reanchor_jax.bench import costs, gpu_check, growth


@pytest.mark.slow
def test_small_shapes_are_measured_once(tmp_path, monkeypatch, capsys):
    out = tmp_path / "figures.json"
    assert gpu_check.main(["--out", str(out), "--tiny"]) == 0
    found = json.loads(out.read_text())
    assert all(value < 0.05 for value in found["numerics"]["largest_difference"].values())
    assert [(row["context"], row["nodes"]) for row in found["kernel"]] == [(128, 1), (128, 16)]
    assert set(found["speedup"]["Qwen3-8B"]) == {"dflash", "reanchor", "rest_ms"}
    for name in ("_numerics", "_kernel", "_passes"):
        monkeypatch.setattr(gpu_check, name, lambda *_: pytest.fail("a section was measured again"))
    capsys.readouterr()
    assert gpu_check.main(["--out", str(out), "--tiny"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_figures_of_another_device_are_not_mixed_with_these(tmp_path, capsys):
    out = tmp_path / "figures.json"
    out.write_text(json.dumps({"environment": {"device": "another"}}))
    assert gpu_check.main(["--out", str(out), "--tiny"]) == 2
    assert "holds figures of {'device': 'another'}" in capsys.readouterr().err


def test_full_shapes_need_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert gpu_check.main(["--out", str(tmp_path / "figures.json")]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["nowhere/figures.json", "."])
@pytest.mark.parametrize(("script", "flags"), [(gpu_check, ["--tiny", "--out"]), (growth, ["--json"]), (costs, ["--json"])])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path, capsys, monkeypatch, script, flags, where):
    for name in ("_numerics", "_parts", "_in_a_process"):
        monkeypatch.setattr(script, name, lambda *_, **__: pytest.fail("something was measured"), raising=False)
    with pytest.raises(SystemExit) as ended:
        script.main([*flags, str(tmp_path / where)])
    assert ended.value.code == 2
    assert str(tmp_path / where) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (costs, ["--context", "39"], "--context at least 40, a prompt with what is decoded behind it; got 1 and 39."),
        (costs, ["--batch", "0"], "--batch must be at least 1"),
        (costs, ["--context", "100000"], "context (100000) exceeds the 512 positions"),
        (costs, ["--methods", ""], "--methods must name some of autoregressive, dflash"),
        (costs, ["--methods", "dflash,nosuch"], "got nosuch."),
        (costs, ["--pair", "nowhere"], "neither a directory nor an embedded pair"),
        (gpu_check, ["--tiny", "--out", "bad.json"], "bad.json must hold a JSON object; got list."),
        (gpu_check, ["--tiny", "--out", "cut.json"], "cut.json is not valid JSON"),
        (gpu_check, ["--tiny", "--out", "new.json", "--seconds", "nan"], "--seconds must be more than 0; got nan."),
    ],
)
def test_arguments_that_measure_nothing_are_refused_in_one_line(tmp_path, capsys, monkeypatch, script, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "cut.json").write_text('{"environment"')
    monkeypatch.setattr(costs, "_in_a_process", lambda *_: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_growth_prints_a_ratio_to_the_first_line_of_each_part(tmp_path, capsys):
    assert growth.main(["--short", "--json", str(tmp_path / "growth.json")]) == 0
    rows = json.loads((tmp_path / "growth.json").read_text())["rows"]
    assert len({row["part"] for row in rows}) == 8
    one, two = (row for row in rows if row["part"] == "batch")
    assert two["ratio"] == pytest.approx(two["milliseconds"] / one["milliseconds"])
    assert all(row["milliseconds"] > 0 for row in rows)
    assert capsys.readouterr().out.count(" ms ") == len(rows)


@pytest.mark.slow
def test_costs_come_from_processes_of_their_own(tmp_path, capsys):
    out = tmp_path / "costs.json"
    assert costs.main(["--methods", "autoregressive", "--context", "128", "--batch", "2", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert min(row["cached_seconds"], row["cold_seconds"]) > 0
    assert row["estimated_bytes"] == sum(inspection.memory_bytes(pairs.path("stories260k"), batch=2, context=128).values())
    assert row["peak_bytes"] > row["estimated_bytes"]
    assert capsys.readouterr().out.count("with the persistent cache") == 1
