"""Versions that must agree between the processes of a job."""

import ast
import platform
from importlib import metadata
from pathlib import Path

from common.process.versions import COMPUTING, INSTALL_BRIDGE, versions
from tests.rigs.configs import HEAVY, imported_by, write_distribution
from tests.rigs.processes import ROOT

# Modules of common.config that the rooms which compute import, and why no certificate is about them.
NOT_PROVEN = {
    "converted": "the manifest of a converted folder; certify reads no such folder",
    "loading": "reads and writes YAML",
    "passthrough": "warns of keys; learner.megatron.extra is in the certificate",
}


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


def test_a_certificate_follows_all_code_of_the_config_that_computes() -> None:
    rooms = [ROOT / name for name in COMPUTING if not name.startswith("common/")]
    files = [file for room in rooms for file in ([room] if room.suffix else room.rglob("*.py"))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    found = {name.removeprefix("common.config.") for name in imported if name.startswith("common.config.")}
    listed = {Path(name).stem for name in COMPUTING if name.startswith("common/config/")}
    assert all((ROOT / name).exists() for name in COMPUTING)
    assert found - listed == NOT_PROVEN.keys()


def test_nothing_heavy_is_imported() -> None:
    assert not HEAVY & imported_by("from common.process.versions import versions; versions()")
