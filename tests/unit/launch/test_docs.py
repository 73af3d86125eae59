"""The pages: links lead somewhere, every page is in the index, commands and scripts that they name exist."""

import re
from pathlib import Path

import pytest

from launch.cli import HANDLERS

ROOT = Path(__file__).resolve().parents[3]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = "bench|broker|common|configs|docs|launch|learner|requirements|rollout_fleet|tests"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_and_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", text)
    assert [name for name in files if not list(ROOT.glob(name))] == []
    scripts = re.findall(r"python (bench/\w+\.py)", text)
    assert [name for name in scripts if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`slipstream (\w+)|^\s*slipstream (\w+)", page.read_text(), re.MULTILINE)
    assert {a or b for a, b in named} - set(HANDLERS) == set()


def test_the_index_has_every_page_and_the_page_of_commands_every_command() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert {page for page in pages if f"({page})" not in index} == {"README.md"}
    lines = (ROOT / "docs" / "commands.md").read_text().splitlines()
    table = "".join(line for line in lines if line.startswith("| `slipstream"))
    assert [name for name in HANDLERS if not re.search(rf"\b{name}\b", table)] == []


def test_the_page_of_configs_has_every_config() -> None:
    text = (ROOT / "configs" / "README.md").read_text()
    assert [path.stem for path in (ROOT / "configs").glob("*.yaml") if f"`{path.stem}`" not in text] == []
