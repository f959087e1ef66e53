"""Every notebook runs from top to bottom in a fresh kernel, and is stored as it ran.

`uv run python tests/test_notebooks.py` runs them and stores the outputs, which is to be done after every change.
"""

import itertools
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("default")  # the messaging libraries warn about themselves
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, monkeypatch):
    cache = Path(__file__).parents[1] / ".cache" / "jax"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", str(2**31))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    stored = [_kinds(cell) for cell in _code_cells(nbformat.read(path, as_version=4))]
    assert [_kinds(cell) for cell in _code_cells(execute(path))] == stored, "the stored outputs are of other cells"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_fit_to_publish(path: Path):
    assert path.stat().st_size < 1_000_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown" and "colab-badge.svg" in notebook.cells[0].source
    assert f"/blob/main/notebooks/{path.name}" in notebook.cells[0].source
    assert '"google.colab" in sys.modules' in notebook.cells[1].source
    assert not any(output.output_type == "error" for cell in notebook.cells for output in cell.get("outputs", ()))


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a new run."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _kinds(cell: nbformat.NotebookNode) -> list[list[str]]:
    """What a code cell put out: the media types of every output, a stream once however it was cut into parts.

    Warnings on stderr depend on the machine.
    """
    outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    kinds = [sorted(output.get("data", {output.output_type: None})) for output in outputs]
    return [kind for kind, _ in itertools.groupby(kinds)]


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(execute(path), path)
