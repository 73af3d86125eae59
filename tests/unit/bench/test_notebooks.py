"""The notebooks of examples/: they have their pictures, and their cells run with the present code."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import pytest

from tests.rigs.processes import ROOT
from tests.rigs.telemetry import Fixture

FOLDER = ROOT / "examples" / "notebooks"
LARGEST_BYTES = 400_000


def cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the figures that `plt.show` was called for."""
    figures = list[int]()
    matplotlib.use("Agg")
    monkeypatch.setattr(plt, "show", lambda: figures.extend(plt.get_fignums()) or plt.close("all"))
    return figures


def ran(name: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    with plt.rc_context():
        for cell in cells(name):
            exec("".join(cell["source"]), space)  # as a kernel does
    return space


@pytest.mark.parametrize("name", ["loss_and_staleness", "reading_a_run"])
def test_a_notebook_is_small_and_was_executed_in_order_without_an_error(name: str) -> None:
    assert (FOLDER / f"{name}.ipynb").stat().st_size < LARGEST_BYTES
    found = cells(name)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5


def test_the_cells_about_the_loss_and_the_bound_run(shown: list[int]) -> None:
    space = ran("loss_and_staleness")
    assert len(shown) == 5
    seconds = {k: end for k, (_, _, end) in space["runs"].items()}
    assert seconds[0] > seconds[2], "overlap saves time"
    assert {k: max(ages) for k, (_, ages, _) in space["runs"].items()} == {k: k for k in space["bounds"]}


def test_the_cells_about_a_run_read_its_files(
    shown: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fixture(tmp_path / "run", steps=40, nodes=2).write(0, transcripts=40)
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    space = ran("reading_a_run")
    assert len(shown) == 5
    assert len(space["metrics"]) == 40
    said = capsys.readouterr().out
    assert "40 steps in" in said and "of all steps after the first" in said
