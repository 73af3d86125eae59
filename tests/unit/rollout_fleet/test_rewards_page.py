"""docs/rewards.md: its function, its config and its tables are those of the code."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from common.config.loading import build_config, load_config, parse_mapping
from rollout_fleet.driver_factory import MADE_UP
from rollout_fleet.environments import reward_library
from rollout_fleet.environments.builtin.reward_function import messages_of
from rollout_fleet.environments.description import check_environment
from rollout_fleet.environments.registry import played, resolve
from tests.rigs.processes import ROOT

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
(FUNCTION,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
JOB, PROMPT = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
ROW = {"question": "1+1?", "answer": "1 + 1 = 2\n#### 2"}
MOST_LINES = 30
TEXT = {"completion", "row", "action"}


def test_the_job_of_the_page_has_at_most_30_lines_and_its_function_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(JOB.splitlines()) <= MOST_LINES
    (tmp_path / "rewards.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    config = build_config(parse_mapping(JOB, "job.yaml"), "job.yaml")
    check_environment(config.tasks)
    judge = resolve("rewards:last_number")
    answers = ("so #### 2", "2 or 3", "no number", *MADE_UP)
    assert [judge(answer, dict(ROW)) for answer in answers] == [1.0, 0.0, 0.0, 0.0, 0.0]
    prompt = played(config.tasks)[1]["prompt"]
    assert list(messages_of(prompt, ROW)) == [("user", "1+1?\nReason step by step, then give the number after ####.")]


def test_the_messages_of_the_page_are_a_prompt() -> None:
    tasks = {"dataset": "d", "reward": "exact_match", **parse_mapping(PROMPT, "page")}
    config = build_config({**parse_mapping(JOB, "page"), "tasks": tasks}, "page")
    assert [role for role, _ in messages_of(played(config.tasks)[1]["prompt"], ROW)] == ["system", "user"]


def test_the_config_with_rewards_is_short_and_its_functions_are_there() -> None:
    path = ROOT / "configs" / "qwen3-0.6b-rewards.yaml"
    assert len(path.read_text().splitlines()) <= MOST_LINES
    config = load_config(path)
    check_environment(config.tasks)
    ((_, said),) = messages_of(played(config.tasks)[1]["prompt"], ROW)
    assert said.endswith("\\boxed{}.")


def test_the_page_has_every_built_in_reward_with_its_options_and_the_made_up_completion() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", PAGE, re.MULTILINE))
    for name in reward_library.BUILT_IN:
        options = inspect.signature(getattr(reward_library, name)).parameters.keys() - TEXT
        assert set(re.findall(r"`(\w+)`", rows[name])) >= options
    assert f"`{MADE_UP[0]}`" in " ".join(PAGE.split())
