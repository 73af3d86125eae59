"""The pinned environment fits every Python that it may be built with, not only the one that it was frozen from."""

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
OLDEST = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}


def pinned(name: str) -> dict[str, Requirement]:
    """Requirements of a file by name."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith(("#", "-"))]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@pytest.mark.parametrize("name", ["cpu.txt"])
def test_what_only_older_pythons_need_is_pinned_too(name: str) -> None:
    pins = pinned(name)
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
    assert not missing, f"requirements/{name} lacks {missing}"
