"""Files at the top that other programs read: the citation, the hooks of git, and the forms of an issue."""

import re
import tomllib

import pytest
import yaml

from tests.rigs.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"]


def test_the_citation_names_the_version_and_the_licence_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_the_hooks_run_every_check_of_the_tests_but_the_tests() -> None:
    script = (ROOT / "launch" / "test.sh").read_text()
    checks = re.findall(r'^ *step "(?:ruff|pyright|import|plain|hadolint)[^"]*" (.*)$', script, re.MULTILINE)
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].removeprefix(".venv/bin/"): hook for hook in repo["hooks"]}
    assert {check.removesuffix(" .") for check in checks} == set(hooks) and len(checks) == 6
    assert hooks["hadolint launch/cluster/Dockerfile"]["files"] == "Dockerfile"
    for entry, hook in hooks.items():  # ruff gets the files that change, the others look at everything
        assert (hook["language"], hook.get("pass_filenames", True)) == ("system", entry.startswith("ruff"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_of_an_issue_has_what_the_site_asks_for(form) -> None:
    document = yaml.safe_load(form.read_text())
    assert all(document[key] for key in ("name", "description", "body"))
    assert {part["type"] for part in document["body"]} <= {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    fields = [part for part in document["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)
