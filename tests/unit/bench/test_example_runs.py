"""The examples: each is complete, its README says how to run it and which curve to expect, and curves are judged."""

import asyncio
import json
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import example_runs
import psutil
import pytest
import yaml
from example_runs import CLAIM, EXAMPLES, Example, bars, example, judged, names, played
from harness import json_lines

from common.config.loading import load_either
from rollout_fleet.environments.protocol import Action
from tests.rigs.waiting import until

CLAIMED = CLAIM.search("- `reward_mean` of `run`: below 0.5, then above 0.9")
LISTED = (
    "countdown", "curriculum", "distillation", "judge", "lora", "own-environment", "ppo", "reward-function",
    "several-turns", "sft-then-rl", "tools-agent",
)  # fmt: skip


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_folder(folder: Path, rewards: list[float]) -> Path:
    (folder / "run").mkdir(parents=True)
    lines = (json.dumps({"reward_mean": reward, "environment": {"won": reward / 2}}) for reward in rewards)
    (folder / "run" / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_the_examples_that_the_page_lists_are_there() -> None:
    assert tuple(names()) == LISTED
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in LISTED if f"]({name}/README.md)" not in page] == []


@pytest.mark.parametrize("name", LISTED)
def test_an_example_s_configs_are_valid_and_its_commands_name_its_files(name: str) -> None:
    folder, found = EXAMPLES / name, example(name)
    files = {file.name for file in folder.iterdir() if not file.name.startswith("__")}
    assert {"README.md", "config.yaml", "make_data.py"} <= files
    configs = {file for file in files if file.endswith(".yaml")}
    for file in configs:
        job = load_either(folder / file)
        assert not Path(job.run.dir).is_absolute() and job.run.seed == 1
    assert [file for file in {*configs, "make_data.py"} if file not in found.commands] == []
    jobs = {yaml.safe_load((folder / file).read_text())["run"]["dir"] for file in configs}
    assert {claim["run"] for claim in found.claims} <= jobs
    assert len((folder / "README.md").read_text().splitlines()) <= 25


def test_a_readme_without_commands_or_claims_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_runs, "EXAMPLES", tmp_path)
    for text in ("```bash\ntrue\n```\n", "- `reward_mean` of `run`: below 0.5, then above 0.9\n"):
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "README.md").write_text(text)
        with pytest.raises(ValueError, match=r"examples/mine/README\.md: expected one bash block"):
            example("mine")


def test_a_curve_that_is_not_as_claimed_fails_with_both_figures(tmp_path: Path) -> None:
    assert CLAIMED
    rising = run_folder(tmp_path / "a", [0.2] * 5 + [0.6] * 10 + [0.95] * 10)
    found = judged(CLAIMED, rising)
    assert (found["first_5"], found["last_10"], found["bars"][0], found["bars"][-1]) == (0.2, 0.95, "▁", "█")
    won = CLAIM.search("- `environment/won` of `run`: below 0.5, then below 0.9")
    assert won and judged(won, rising)["last_10"] == 0.475
    for number, rewards in enumerate(([0.6] * 5 + [0.95] * 10, [0.2] * 5 + [0.85] * 10)):
        with pytest.raises(RuntimeError, match=f"found {rewards[0]} and {rewards[-1]}"):
            judged(CLAIMED, run_folder(tmp_path / str(number), rewards))


def test_a_command_that_fails_ends_the_example_and_what_it_left_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CLAIMED
    monkeypatch.setattr(example_runs, "EXAMPLES", tmp_path / "examples")
    (tmp_path / "examples" / "mine").mkdir(parents=True)
    script = "sleep 600 & echo $! >pid\necho 'no such run' >&2\nfalse\necho never\n"
    with pytest.raises(RuntimeError, match="exited with 1") as raised:
        played(Example("mine", script, [CLAIMED]), tmp_path)
    assert "no such run" in str(raised.value) and "never" not in str(raised.value)
    pid = int((tmp_path / "mine" / "pid").read_text())
    until(lambda: gone(pid))


def test_a_flat_curve_is_drawn_low() -> None:
    assert bars([1.0] * 40) == "▁" * 20
    assert bars([0.0, 1.0]) == "▁█"


def test_the_mode_of_the_test_script_sets_the_environment_up_and_runs_the_named_ones(tmp_path: Path) -> None:
    for file, text in (("launch/setup.sh", 'echo "set up $@"'), (".venv/bin/python", '#!/bin/sh\necho "ran $@"')):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(f"{text}\n")
        (tmp_path / file).chmod(0o755)
    script = shutil.copy(example_runs.ROOT / "launch" / "test.sh", tmp_path / "launch")
    done = subprocess.run(["bash", script, "examples", "lora", "ppo"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set up cpu", "ran bench/example_runs.py lora ppo"]


def own(name: str, file: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / name / file)))


def test_the_reward_function_compares_the_last_number() -> None:
    last_number = own("reward-function", "rewards.py").last_number
    row = {"answer": "7+5=12, 12-3=9\n#### 9"}
    assert [last_number(text, row) for text in ("12, 9", "9, 12", "nine", "-9", "")] == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_group_sorts_the_same_digits_and_each_in_its_place_pays() -> None:
    make, seeds = own("own-environment", "sorting.py").Sorting, ((1, 5), (2, 5), (3, 6))
    first, same, other = (make({"digits": 4}, seed=seed, group_seed=shared) for seed, shared in seeds)
    assert first.digits == same.digits != other.digits
    right = "".join(sorted(first.digits))
    answers = [(right, True), (right[0], True), ("", True), (right, False)]
    found = [asyncio.run(first.step(Action(text, tokens=(), ended=ended))) for text, ended in answers]
    assert [result.reward for result in found] == [1.0, 0.25, 0.0, 0.0]
    assert [result.metrics["sorted"] for result in found] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7*4-2", 1.0), ("7+4=11*2=22\n7*4-2", 1.0), (" (7*4) - 2 ", 1.0), ("-2+7*4", 0.0), ("7*4-2\n", 0.0),
        ("7+4*2", 0.0), ("7+7+7+7-2", 0.0), ("28-2", 0.0), ("7*4-2+0", 0.0), ("7*4", 0.0), ("7*4-2.0", 0.0),
        ("26", 0.0), ("7*", 0.0), ("7/(4-4)", 0.0), ("x*4-2", 0.0), ("__import__('os')", 0.0), ("7**4-2", 0.0),
        ("7*4-2" + " " * 99 + "#", 0.0), ("(" * 60, 0.0), ("7\x004", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_countdown_pays_for_an_exact_expression_of_all_numbers_once(answer: str, reward: float) -> None:
    game = own("countdown", "countdown.py").Countdown({"numbers": [7, 4, 2], "target": 26}, seed=0)
    assert asyncio.run(game.reset()) == "7 4 2 = 26\n"
    assert asyncio.run(game.step(Action(answer, tokens=(), ended=True))).reward == reward
    assert asyncio.run(game.step(Action(answer, tokens=(), ended=False))).reward == 0.0


def test_countdown_s_quotients_are_exact() -> None:
    solves = own("countdown", "countdown.py").solves
    assert solves("8/(3-8/3)", [8, 3, 8, 3], 24) and not solves("7/3*3", [7, 3], 7)
    assert [solves("4/2+1", [1, 2, 4], 3), solves("4/3+1", [1, 3, 4], 2)] == [True, False]


def test_countdown_s_problems_are_solvable_and_none_is_in_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, solves = runpy.run_path(str(EXAMPLES / "countdown" / "make_data.py")), own("countdown", "countdown.py").solves
    few = {"HELD_OUT": 20, "TRAIN": 60, "PATIENT": 200, "SLOPPY": 100, "build_model": lambda *_, **__: None}
    make["main"].__globals__.update(few)
    make["main"]()
    rows = {path.stem: json_lines(path) for path in tmp_path.glob("*.jsonl")}
    right, asked = [], []
    for row in rows.pop("warm_start"):
        numbers, _, target = row["prompt"].strip().partition(" = ")
        asked.append({"numbers": [int(number) for number in numbers.split()], "target": int(target)})
        right.append(solves(row["completion"].split("\n")[-1], *asked[-1].values()))
    assert all(right[:200]) and 20 < sum(right[200:]) < 90, "the last ones give up"
    keys = {name: {make["key"](row) for row in found} for name, found in (rows | {"warm_start": asked}).items()}
    assert (len(keys["held_out"]), len(keys["train"])) == (20, 60)
    assert not keys["held_out"] & keys["train"] and not keys["warm_start"] & (keys["held_out"] | keys["train"])


def test_a_walk_ends_at_the_goal_at_nonsense_and_when_its_moves_are_used_up() -> None:
    def walked(moves: str, left: int = 6) -> tuple[float, bool, str]:
        async def play() -> tuple[float, bool, str]:
            walk = own("several-turns", "walk.py").Walk({"start": [0, 0], "goal": [1, 1]}, seed=0, moves=left)
            found = [await walk.step(Action(move, tokens=(), ended=True)) for move in moves]
            return found[-1].reward, found[-1].done, found[-1].observation

        return asyncio.run(play())

    assert walked("RD") == (1.0, True, "\nat 1,1 to 1,1: ")
    assert walked("LU") == (0.0, False, "\nat 0,0 to 1,1: "), "walls stop a move"
    assert [walked("R?")[:2], walked("RR", left=2)[:2]] == [(0.0, True), (0.0, True)]
