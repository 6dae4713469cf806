"""Notebooks run from top to bottom, and what they claim holds: they print their checks as lines that end in `: True`."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

_FOLDER = Path(__file__).parent.parent / "notebooks"
_NAMES = sorted(path.name for path in _FOLDER.glob("*.ipynb"))
_MAX_BYTES = 400_000  # outputs included; larger files load slowly in a browser


def test_notebooks_are_found():
    assert "1_one_round.ipynb" in _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_notebook_is_stored_with_the_outputs_of_one_run_from_top_to_bottom(name):
    notebook = nbformat.read(_FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert _failed_or_missing_checks(notebook) == []
    assert (_FOLDER / name).stat().st_size < _MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_notebook_runs_and_its_checks_hold(name, tmp_path):
    notebook = nbformat.read(_FOLDER / name, as_version=4)
    # a cell that raises ends the run with CellExecutionError, whose text holds the cell and its traceback
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _failed_or_missing_checks(notebook) == []


def _failed_or_missing_checks(notebook) -> list[str]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    lines = [line for output in outputs if output.output_type == "stream" for line in output.text.splitlines()]
    checks = [line for line in lines if line.endswith((": True", ": False"))]
    return errors + [line for line in checks if line.endswith("False")] + ([] if checks else ["the notebook prints no check"])
