"""Versions that must agree between the processes of a job."""

import platform
from importlib import metadata
from pathlib import Path

from common.process.versions import INSTALL_BRIDGE, versions
from tests.rigs.configs import HEAVY, imported_by, write_distribution
from tests.rigs.processes import ROOT


def test_this_interpreter_names_its_own_packages() -> None:
    here = versions()
    assert (here["python"], here["torch"]) == (platform.python_version(), metadata.version("torch"))


def test_another_environment_is_read_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "python3.12" / "site-packages"
    write_distribution(folder, "torch", "2.13.0")
    write_distribution(folder, "nvidia-nccl-cu13", "2.29.7")
    found = versions(folder)
    assert (found["python"], found["torch"], found["nccl"]) == ("3.12", "2.13.0", "2.29.7")
    assert found["vllm"] == found["slipstream"] == ""


def test_the_bridge_is_named_in_the_version_that_the_pins_have() -> None:
    pins = (ROOT / "requirements" / "learner-no-deps.txt").read_text().splitlines()
    assert INSTALL_BRIDGE.split()[-1] in pins


def test_nothing_heavy_is_imported() -> None:
    assert not HEAVY & imported_by("from common.process.versions import versions; versions()")
