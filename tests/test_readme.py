"""README: its Python runs, its commands are what CI runs, what it names exists."""

import re
from pathlib import Path

import pytest

from reanchor_jax import cli
from reanchor_jax.bench.methods import METHODS

_ROOT = Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", _README, flags=re.MULTILINE | re.DOTALL)


def test_the_quick_start_runs_as_written(capsys):
    source, _ = _blocks("python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    exec(compile(source, "README.md", "exec"), {})
    tau, *_ = capsys.readouterr().out.split()
    assert float(tau) > 1.5


@pytest.mark.slow
def test_the_texts_block_runs_as_written(capsys):
    _, source = _blocks("python")
    exec(compile(source, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert "there was a little girl named Lily" in told.splitlines()[0]
    assert len(told.splitlines()) > 1


def test_the_shell_blocks_are_the_install_and_the_test_command():
    install, test = _blocks("sh")
    assert install.endswith("pip install . && reanchor-jax demo\n")
    assert test.startswith("pip install '.[test]' && pytest")


def test_commands_and_methods_of_the_readme_exist():
    assert set(re.findall(r"^reanchor-jax (\w+)", _README, flags=re.MULTILINE)) == set(cli.COMMANDS)
    assert all(f"`{name}`" in _README for name in METHODS)


def test_rooms_of_the_readme_exist():
    rooms = _README.split("## Which room holds what")[1].split("```")[1]
    for line in rooms.strip().splitlines():
        parent = _ROOT / "reanchor_jax" if line.startswith("  ") else _ROOT
        for name in re.findall(r"(?<!\S)\w+(?:/|\.py)(?!\S)", line.strip()[:36]):
            assert (parent / name).exists(), name
