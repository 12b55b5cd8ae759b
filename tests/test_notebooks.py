"""notebooks/: each runs from top to bottom, and keeps a copy of what it shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook):
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    stored = nbformat.read(path, as_version=4)
    assert stored.cells[0].source.startswith("# ") and "**Claim: " in stored.cells[0].source
    assert "## Exercises" in stored.cells[-1].source
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "stored as run, in order"
    assert any("assert " in cell.source for cell in code), "the claim is checked"
    assert all(output.get("name") != "stderr" for output in outputs(stored))

    again = nbformat.read(path, as_version=4)
    NotebookClient(again, timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    assert pictures(again) == pictures(stored) > 0
    assert not [output for output in outputs(again) if output.output_type == "error"]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS][0] == "1_training_curves.ipynb"
