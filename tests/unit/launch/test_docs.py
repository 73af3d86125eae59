"""The pages: links, commands and scripts that they name exist; what a program writes on them is what the code says."""

import re
from pathlib import Path

import pytest

from common.config.loading import key_paths
from common.config.schema import Config, LearnerConfig, SftConfig, SftLearnerConfig
from launch.cli import COMMANDS
from tests.docs_reference import DOCS, config_page, filled, metrics_page
from tests.rigs.processes import ROOT

TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ROADMAP.md", "SECURITY.md", "configs/README.md")
BELOW = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
PAGES = [*(ROOT / name for name in TOP), *BELOW]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WRITTEN = [page for page in PAGES if page.parent == DOCS and page.name not in ("config.md", "metrics.md")]
MADE = re.compile(r"<!-- (figures: [\w-]+|example) -->.*?<!-- end[\w ]* -->", re.DOTALL)  # by a program
SECTIONS = "run|model|tasks|learner|rollout|broker|staleness|weights|telemetry|evaluation|scorers"
FOLDERS = "bench|broker|common|configs|docs|launch|learner|requirements|rollout_fleet|tests"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_file_and_command_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", text)
    assert [name for name in files if not list(ROOT.glob(name))] == []
    scripts = re.findall(r"python (bench/\w+\.py)", text)
    assert [name for name in scripts if not (ROOT / name).exists()] == []
    named = re.findall(r"`slipstream (\w+)|^\s*slipstream (\w+)", text, re.MULTILINE)
    assert {a or b for a, b in named} - set(COMMANDS) == set()


def test_the_index_has_every_page_and_the_pages_of_commands_and_configs_every_one() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert {page for page in pages if f"({page})" not in index} == {"README.md"}
    lines = (ROOT / "docs" / "commands.md").read_text().splitlines()
    table = "".join(line for line in lines if line.startswith("| `slipstream"))
    assert [name for name in COMMANDS if not re.search(rf"\b{name}\b", table)] == []
    text = (ROOT / "configs" / "README.md").read_text()
    assert [path.stem for path in (ROOT / "configs").glob("*.yaml") if f"`{path.stem}`" not in text] == []


def test_the_page_of_the_config_says_which_keys_the_learner_of_a_warm_start_lacks() -> None:
    text = (ROOT / "docs" / "config.md").read_text()
    lacks = re.findall(r"`(\w+)`", text.partition("Its `learner` is as above without")[2].partition(".")[0])
    assert {*lacks} == {*LearnerConfig.__struct_fields__} - {*SftLearnerConfig.__struct_fields__}


def test_every_page_is_short_and_all_of_them_are() -> None:
    """A word has a letter or a digit. The output of a program does not count."""
    words = {page.name: len(re.findall(r"\S*\w\S*", MADE.sub("", page.read_text()))) for page in WRITTEN}
    assert {name: count for name, count in words.items() if count > 1_200} == {}
    assert sum(words.values()) <= 40_000


@pytest.mark.parametrize("page", [ROOT / "README.md", *WRITTEN], ids=lambda page: page.name)
def test_every_key_that_a_page_names_exists(page: Path) -> None:
    keys = {*key_paths(Config), *key_paths(SftConfig)}
    known = keys | {key.rpartition(".")[0] for key in keys}
    free = re.compile(
        r"^scorers|^tasks\.(agents|sources|options)|\.extra|\.(md|py|sh|json|jsonl|log|yaml|sbatch|html|txt)$"
    )
    found = re.findall(rf"`((?:{SECTIONS})(?:\.[a-z_]+)+)(?:[:=][^`]*)?`", page.read_text())
    assert {key for key in found if key not in known and not free.search(key)} == set()


# ---------------------------------------------------------------- written by a program


def test_every_key_has_a_row_with_its_range_its_default_and_a_meaning() -> None:
    found = re.findall(r"^\| `([\w.[\]]+)` \| (.*) \|$", config_page(), re.MULTILINE)
    rows = {key: cells.split(" | ") for key, cells in found}
    sections = {key for key in key_paths(Config) if any(other.startswith(f"{key}.") for other in key_paths(Config))}
    sections |= {"watch", "scorers"}  # a list and a mapping; their rows are those of one entry
    assert set(key_paths(Config)) - sections - set(rows) == set()
    assert [key for key, (_, _, means) in rows.items() if not means.strip()] == []
    assert rows["run.steps"][:2] == ["an integer >= 1", "needed"]
    assert rows["rollout.top_p"][:2] == ["a number > 0 and <= 1", "`1.0`"]
    assert rows["rollout.concurrency"][:2] == ["an integer >= 1 or one of auto", "`128`"]
    assert rows["weights.transport"][:2] == ["one of gloo, nccl, relay", "`gloo`"]
    assert rows["tasks.limits.process"][:2] == ["true or false", "unset"]
    assert "[delta.md](delta.md)" in rows["weights.encoding"][2], "pages that a meaning names are links"
    assert "[waste.md](waste.md)" in metrics_page()
    assert "| `canary_max_difference` | nat | max | newest canary: largest \\|learner - engine\\| |" in metrics_page()


def test_the_pages_of_keys_and_metrics_are_what_the_code_declares() -> None:
    advice = "run python -m tests.docs_reference"
    assert (DOCS / "config.md").read_text() == config_page(), advice
    assert (DOCS / "metrics.md").read_text() == metrics_page(), advice
    every = SftLearnerConfig().checkpoint
    closing = f"\nIts checkpoints have the defaults `every: {every.every}` and `keep: {every.keep}`.\n"
    assert closing in (DOCS / "config.md").read_text()


def test_a_section_without_a_heading_in_its_page_is_noticed() -> None:
    with pytest.raises(ValueError) as refused:
        filled(DOCS / "config.md", "key | means", {"new": []})
    assert "'new'" in str(refused.value)
