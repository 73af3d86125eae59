"""The documentation site builds without a warning, its links lead somewhere, and it loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from launch.cli import COMMANDS
from rollout_fleet.environments.protocol import Limits
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S

pytestmark = pytest.mark.slow
LOADED = re.compile(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The pages of the site by their place; mkdocs fails at the first warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return {page: page.read_text() for page in sorted(folder.rglob("*.html")) if page.name != "404.html"}


def test_every_link_within_the_site_leads_to_a_file_and_to_a_place_in_it(site: dict[Path, str]) -> None:
    places = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in site.items()}
    broken: list[tuple[str, str]] = []
    for page, text in site.items():
        for link in set(re.findall(r'\b(?:href|src)="(?!\w+:|//)([^"]*)"', text)):
            name, _, place = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.is_file() or (place and target in places and place not in places[target] | {"__skip"}):
                broken.append((page.name, link))
    assert broken == []


def test_a_page_that_is_opened_loads_nothing_from_elsewhere(site: dict[Path, str]) -> None:
    loaded = {a or b for text in site.values() for a, b in LOADED.findall(text)}
    assert any(name.endswith(".js") for name in loaded) and any(name.endswith(".css") for name in loaded)
    assert [name for name in loaded if re.match(r"\w+:|//", name) and not name.startswith("data:")] == []


def test_the_reference_has_every_command_and_the_comments_of_fields(site: dict[Path, str]) -> None:
    pages = {page.name: text for page, text in site.items()}
    assert [name for name in COMMANDS if f'id="slipstream-{name}"' not in pages["cli.html"]] == []
    api = re.sub(r"<[^>]+>", "", pages["api.html"])
    assert "sampled token ids, the end token included" in api, "the comment behind a field"
    assert [name for name in Limits.__annotations__ if name not in api] == []
