"""Comparing drafters: which are found by what name, and what the table tells of them."""

import json
import subprocess
import sys

import pytest

from reanchor_jax import pairs
from reanchor_jax.bench import drafters, tables
from reanchor_jax.bench.drafters import find_drafters


def test_embedded_drafters_go_by_their_names_and_trained_ones_by_their_runs(tmp_path):
    root = pairs.path("stories260k")
    everything = find_drafters("stories260k", None)
    assert everything["dflash"] == root
    assert everything["domino"] == root / "drafters" / "domino"
    assert {f"stories260k/{name}" for name in everything} == {name for name in pairs.names() if "/" in name}
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    given = [str(tmp_path / "run" / "drafter"), "domino", str(tmp_path / "other")]
    assert find_drafters("stories260k", given) == {
        "run": tmp_path / "run" / "drafter",
        "domino": root / "drafters" / "domino",
        "other": tmp_path / "other",
    }


def test_drafters_of_one_name_and_pairs_without_any_are_refused(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent / "same").mkdir(parents=True)
    with pytest.raises(ValueError, match="two drafters are called same"):
        find_drafters("stories260k", [str(tmp_path / "a" / "same"), str(tmp_path / "b" / "same")])
    with pytest.raises(ValueError, match="has no drafters by name"):
        find_drafters(str(tmp_path), None)
    with pytest.raises(FileNotFoundError, match="'none' is neither a directory nor an embedded pair"):
        find_drafters("stories260k", ["none"])


def run(drafter: str, temperature: float, taus: tuple[float, float]) -> dict:
    def figures(tau):
        return {
            "tau": tau,
            "tau_standard_error": 0.1,
            "target_passes": round(1000 / tau),
            "tokens_per_second": 100 * tau,
            "identical": True,
        }

    names = ("autoregressive", "dflash", "reanchor")
    environment = {"device": "cpu", "cores": 1, "dtype": "float32", "versions": {"jax": "0.11"}}
    methods = {name: figures(tau) for name, tau in zip(names, (1.0, *taus), strict=True)}
    speedup = {name: found["tau"] / 2 for name, found in methods.items()}
    found = {"drafter": drafter, "temperature": temperature, "methods": methods, "speedup": speedup, "identical": drafter != "odd"}
    return {**found, "environment": environment, "prompts": []}


def test_the_table_has_a_row_a_drafter_and_method_and_three_cells_a_temperature(tmp_path):
    for name, temperature, taus in (("even", 0.0, (4.0, 5.0)), ("even", 1.0, (2.0, 2.5)), ("odd", 0.0, (3.0, 3.25))):
        folder = tmp_path / name / f"T{temperature:g}"
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(run(name, temperature, taus)))
    (tmp_path / "gsm8k" / "T0").mkdir(parents=True)
    (tmp_path / "gsm8k" / "T0" / "results.json").write_text('{"benchmark": "gsm8k"}')  # of another command
    summary = drafters.write_summary(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == summary
    lines = tables.drafter_table(summary, title="Some").splitlines()
    assert lines[4:8] == [
        "| even | alone | 4.00 / 2.00x | 250 | 400 | 2.00 / 1.00x | 500 | 200 |",
        "| even | + ReAnchor | 5.00 / 2.50x | 200 | 500 | 2.50 / 1.25x | 400 | 250 |",
        "| odd | alone | 3.00 / 1.50x | 333 | 300 | - | - | - |",
        "| odd | + ReAnchor | 3.25 / 1.62x | 308 | 325 | - | - | - |",
    ]
    assert lines[-1] == "odd at temperature 0: output differs from plain decoding's."
    assert (tmp_path / "tables.md").read_text().splitlines()[4:8] == lines[4:8]
    assert (tmp_path / "drafters.png").stat().st_size > 1000


def test_bad_arguments_are_refused_before_anything_is_run(tmp_path, capsys):
    for more, message in (
        (("--drafters", "none"), "neither a directory nor an embedded pair"),
        (("--prompts", str(tmp_path / "none.jsonl")), "none.jsonl"),
    ):
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
        given = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit):
            drafters.main([*given, *more])
        assert message in capsys.readouterr().err


def test_what_a_folder_holds_is_compared_before_anything_is_run(tmp_path, capsys, monkeypatch):
    measured = []
    monkeypatch.setattr(drafters, "measure", lambda *_, out, **__: measured.append(out.relative_to(tmp_path / "out").as_posix()))
    monkeypatch.setattr(drafters.charts, "has_matplotlib", lambda: False)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    given = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out"), "--temperatures", "0,0.5"]

    def refused(*more) -> str:
        measured.clear()
        with pytest.raises(SystemExit):
            drafters.main([*given, *more])
        assert not measured
        return capsys.readouterr().err

    assert drafters.main([*given, "--drafters", "dflash"]) == 0
    assert measured == ["dflash/T0", "dflash/T0.5"]
    assert "no charts: they need matplotlib; install the extra bench" in capsys.readouterr().err
    # of another drafter too, for all are rows of one table
    assert "out holds a run with other settings (max_new_tokens)" in refused("--drafters", "domino", "--max-new-tokens", "7")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Tom"}\n')
    assert "out holds a run with other settings (prompts)" in refused("--drafters", "domino")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once"}\n')
    # the second drafter's folder is another's
    (tmp_path / "out" / "domino").symlink_to(tmp_path / "out" / "dflash")
    told = refused("--drafters", "dflash,domino")
    assert "holds a run with other settings (model, weights.drafter)" in told
    (tmp_path / "out" / "domino").unlink()
    for place in ("tables.md", "dflash/T0.5/results.json"):
        (tmp_path / "out" / place).unlink(missing_ok=True)
        (tmp_path / "out" / place).mkdir()
        assert "it is a directory" in refused("--drafters", "dflash")
        (tmp_path / "out" / place).rmdir()
    for content in ('{"drafter": "odd"}', "{", json.dumps(run("odd", 0.0, (2.0, 3.0)) | {"methods": {"dflash": 3}})):
        (tmp_path / "out" / "dflash" / "T0.5" / "results.json").write_text(content)
        assert "results.json is damaged; remove it and ask for that drafter again" in refused("--drafters", "dflash")
    assert "--temperatures names none" in refused("--temperatures", ",")


@pytest.mark.slow
def test_drafters_are_measured_alone_and_with_reanchor_and_not_twice(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt": "Tom had a red ball. He"}\n')
    given = ["--drafters", "dflash,domino", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "20"]
    given += ["--temperatures", "0", "--out", str(tmp_path / "out")]
    assert drafters.main(given) == 0
    first = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["drafter"] for run in first["runs"]] == ["dflash", "domino"]
    assert all(run["identical"] and run["methods"]["dflash"]["tau"] > 1.2 for run in first["runs"])
    capsys.readouterr()
    assert drafters.main(given) == 0
    assert capsys.readouterr().err.count("6 of 6 runs were measured before and are not repeated") == 2
    with pytest.raises(SystemExit):  # rows of another kind in the same table
        drafters.main([*given, "--max-new-tokens", "21", "--drafters", "dspark"])
    assert "other settings (max_new_tokens)" in capsys.readouterr().err


def test_help_needs_no_package_beside_the_library(tmp_path):
    """In a clone that is not installed there is no `reanchor_jax.convert`."""
    program = "import sys; sys.modules['reanchor_jax.convert'] = None; from reanchor_jax.bench.drafters import main; main(['--help'])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert "--drafters" in told.stdout
