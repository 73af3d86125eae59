"""`slipstream sweep`: the runs of its words, their order and names, refusals, the winner's rule, and jobs that fail."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from common.config.loading import build_config, values_of
from common.config.schema import BaseConfig, SftConfig
from common.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, ConfigError
from common.metrics import SftMetrics, StepMetrics, numbers
from common.process.lock_file import only_one
from common.process.run_dir import RunDir
from common.security.credentials import KeyFolder
from launch.cli import main
from launch.keys import make
from launch.sweep import sweep
from launch.sweep.arms import Planned, combined, name_of, plan
from launch.sweep.winner import LOWER, Arm, Rule, Score, Verdict, decide, parse_rule, value_by
from learner.loop.run_files import write_record
from tests.rigs.configs import config_of, document_of, job_of, refusal, write_job

LR, SIZE = "learner.optimizer.lr", "rollout.group_size"
EVALUATED = {"evaluation": {"every": 2, "datasets": ["held/out.jsonl", "more.jsonl"], "samples": 4}}


def planned(job: Path, *words: str, seeds: int | None = None) -> list[Planned]:
    texts, _ = combined(str(job), words, seeds)
    return plan(str(job), texts, job.parent / "sweep")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ["1", "2", "3"]),
        ("1e-6, 3e-6", ["1e-6", "3e-6"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ('"a, b"', ['"a, b"']),
        ("[a.jsonl, b.jsonl],[c.jsonl]", ["[a.jsonl, b.jsonl]", "[c.jsonl]"]),
        ("{a: 1, b: 2},null", ["{a: 1, b: 2}", "null"]),
        ("tcp://h:1,data/*.jsonl", ["tcp://h:1", "data/*.jsonl"]),
        ("", []),
    ],
)
def test_commas_separate_values_except_in_quotes_and_brackets(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_an_arm_may_have_keys_without_effect(job: Path) -> None:
    words = ["learner.optimizer.schedule=constant,linear", "learner.optimizer.min_lr_fraction=0.1"]
    words += ["learner.loss.kl_coefficient=0,0.01", "watch=[{metric: kl_mean, above: 0.5}]"]
    assert len(planned(job, *words)) == 4


def test_the_runs_are_the_product_of_the_values_with_a_folder_and_a_name_each(job: Path) -> None:
    runs = planned(job, f"{LR}=1e-3,0.01", f"{SIZE}=4,8", "run.steps=7", seeds=2)
    names = [f"lr={lr},group_size={size},seed={seed}" for lr in ("0.001", "0.01") for size in (4, 8) for seed in (0, 1)]
    assert [run.entry.name for run in runs] == names
    last = runs[-1]
    assert (last.entry.values, last.entry.seed) == ({LR: 0.01, SIZE: 8}, 1)
    config = last.config.rl
    assert config is not None and (config.run.seed, config.run.steps) == (1, 7)
    assert (config.learner.optimizer.lr, config.rollout.group_size) == (0.01, 8)
    assert (config.run.dir, config.run.name) == (str(job.parent / "sweep" / names[-1]), f"demo-{names[-1]}")
    assert last.run.path == Path(config.run.dir) and not (job.parent / "sweep").exists()
    assert [run.entry.name for run in planned(job, f"{LR}=0.001,1e-2", f"{SIZE}=4,8", seeds=2)] == names, "as typed"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"run.seed": 3}, "seed=3"),
        ({"a.lr": 1e-6, "b.on": True, "c.x": None}, "lr=1e-6,on=true,x=null"),
        ({"learner.threads": 1, "rollout.threads": 2}, "threads=1,threads=2"),
        ({}, ""),
    ],
)
def test_a_name_follows_from_the_values(values: dict[str, Any], name: str) -> None:
    assert name_of(values) == name


def test_a_value_that_is_no_name_of_a_file_gets_a_digest_that_stays() -> None:
    names = [name_of({"tasks.dataset": value}) for value in ("data/a", "data-a", "data a", "x" * 900)]
    assert len(set(names)) == 4 and all("/" not in name and len(name.encode()) < 200 for name in names)
    assert names[1] == "dataset=data-a" and name_of({"tasks.dataset": "data/a"}) == names[0]


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["learner.optimizer.lrr=1,2"], "learner.optimizer.lrr"),
        ([f"{SIZE}=4,many"], SIZE),
        ([f"{SIZE}=4,1"], SIZE),
        (["run.dir=a,b"], "run.dir"),
        (["run.name=a,b"], "run.name"),
        ([f"{LR}=1,2", f"{LR}=3"], LR),
        ([f"{LR}="], LR),
        ([f"{LR}=1,,2"], LR),
        ([f"{LR}=[1,2"], LR),
        ([f"{LR}=1],[2"], LR),
        ([f"{LR}=1e-3,0.001"], "key=a,b,c"),
        ([f"{LR}=1e-3"], "key=a,b,c"),
        ([], "key=a,b,c"),
        ([f"{LR}=1,2", "learner.checkpoint.dir=there"], "learner.checkpoint.dir"),
    ],
)
def test_words_that_no_sweep_can_have_are_refused_before_anything_starts(
    job: Path, words: Sequence[str], key: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(job, *words)
    assert refused.value.key == key
    assert {path.name for path in job.parent.iterdir()} == {"job.yaml", "model", "train.jsonl"}


def test_a_learner_of_several_machines_is_left_to_slurm(job: Path) -> None:
    keys = KeyFolder(job.parent / "keys")
    make(keys, [])
    several = ["learner.world_size=2", "weights.network=trusted", f"broker.credentials={keys.path}"]
    with pytest.raises(ConfigError) as refused:
        planned(job, "learner.machines=1,2", *several)
    assert (refused.value.key, refused.value.found) == ("learner.machines", "2")


def test_the_nearest_key_is_named(job: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(job, f"{LR}r=1,2")
    assert refused.value.hint is not None and "'lr'" in refused.value.hint


@pytest.mark.parametrize(("words", "seeds"), [(["run.seed=1,2"], 2), ([], 0), ([], 1)])
def test_seeds_come_from_one_place_and_there_is_more_than_one(job: Path, words: Sequence[str], seeds: int) -> None:
    with pytest.raises(ConfigError):
        planned(job, *words, seeds=seeds)


# ---------------------------------------------------------------- the winner


def warm_config(folder: Path, **sections: Any) -> BaseConfig:
    document = document_of(folder)
    kept = {"run": document["run"], "model": document["model"], "tasks": {"dataset": document["tasks"]["dataset"]}}
    return build_config({**kept, **sections}, "sft.yaml", schema=SftConfig)


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        ("reward_mean", Rule("reward_mean", "max", 10)),
        ("reward_mean:min", Rule("reward_mean", "min", 10)),
        ("reward_mean:last 3", Rule("reward_mean", "max", 3)),
        ("loss:last20", Rule("loss", "min", 20)),
        ("loss:max:last 20", Rule("loss", "max", 20)),
        ("environment/correct:last 5", Rule("environment/correct", "max", 5)),
        ("evaluation/held-out/pass_at/4", Rule("evaluation/held-out/pass_at/4", "max", 0)),
        ("evaluation/more/mean_reward:last 2", Rule("evaluation/more/mean_reward", "max", 2)),
        (None, Rule("evaluation/held-out/mean_reward", "max", 0)),
    ],
)
def test_a_rule_names_a_metric_a_side_and_how_many_steps(tmp_path: Path, word: str | None, rule: Rule) -> None:
    assert parse_rule(word, job_of(tmp_path, **EVALUATED)) == rule


@pytest.mark.parametrize("metric", ["value_loss", "kl_mean", "teacher_kl_mean", "batch_kl"])
def test_of_losses_and_divergences_the_least_is_best(tmp_path: Path, metric: str) -> None:
    assert parse_rule(metric, job_of(tmp_path)) == Rule(metric, "min", 10)


def test_every_loss_and_divergence_is_one_of_which_the_least_is_best() -> None:
    known = [name for kind in (StepMetrics, SftMetrics) for name in numbers(kind)]
    assert {name for name in known if name.endswith("loss") or "kl" in name.split("_")} == set(LOWER)


def test_without_evaluations_reward_and_loss_decide(tmp_path: Path) -> None:
    assert parse_rule(None, job_of(tmp_path)) == Rule("reward_mean", "max", 10)
    assert parse_rule(None, warm_config(tmp_path)) == Rule("loss", "min", 10)
    assert parse_rule(None, warm_config(tmp_path, evaluation={"every": 5})) == Rule("validation_loss", "min", 0)


@pytest.mark.parametrize("word", ["rewrd_mean", "reward_mean:most", "reward_mean:last 0", "evaluation/held-out/mean"])
def test_a_metric_that_these_runs_do_not_have_is_refused_with_the_nearest(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_rule(word, job_of(tmp_path, **EVALUATED))
    assert refused.value.key == "--winner"
    assert refused.value.hint is not None and ("reward_mean" in refused.value.hint or "mean_" in refused.value.hint)


def evaluation(version: int, reward: float) -> dict[str, Any]:
    return {"step": version, "policy_version": version, "kind": "evaluation", "dataset": "d", "mean_reward": reward}


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        (Rule("reward_mean", "max", 2), 0.35),  # (0.4 + 0.3) / 2
        (Rule("reward_mean", "max", 3), 0.3),
        (Rule("reward_mean", "max", 0), 0.4),
        (Rule("reward_mean", "min", 0), 0.1),
        (Rule("reward_mean", "max", 99), 0.25),
        (Rule("entropy", "max", 2), None),  # the last one is NaN
        (Rule("kl_mean", "max", 2), None),
        (Rule("environment/correct", "max", 2), 1.5),
        (Rule("evaluation/d/mean_reward", "max", 0), 0.8),
        (Rule("evaluation/d/mean_reward", "min", 0), 0.5),
        (Rule("evaluation/d/mean_reward", "max", 2), 0.7),
        (Rule("evaluation/e/mean_reward", "max", 0), None),
    ],
)
def test_the_number_of_a_run_is_a_mean_of_the_last_steps_or_the_best_evaluation(
    tmp_path: Path, rule: Rule, value: float | None
) -> None:
    run = RunDir(tmp_path)
    steps = [
        {"step": step, "reward_mean": reward, "entropy": entropy, "environment": {"correct": step - 1}}
        for step, (reward, entropy) in enumerate(((0.1, 1.0), (0.2, 1.0), (0.4, 1.0), (0.3, None)))
    ]
    other = evaluation(0, 0.9) | {"temperature": 0.0}  # before the evaluations of the run were changed
    lines = [*steps, other, *(evaluation(version, reward) for version, reward in ((1, 0.5), (2, 0.8), (3, 0.6)))]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert value_by(rule, run, config_of(tmp_path)) == (None if value is None else pytest.approx(value))


def test_steps_that_trained_nothing_do_not_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lines = [{"step": n, "tokens_trained": 9 * (n % 2), "entropy": 0.5 * (n % 2)} for n in range(8)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert value_by(Rule("entropy", "max", 4), run, config_of(tmp_path)) == 0.5
    assert value_by(Rule("entropy", "min", 0), run, config_of(tmp_path)) == 0.5


def arms_of(**values: Sequence[float | None]) -> list[Arm]:
    return [
        Arm.of(name, {}, [Score(f"{name}{seed}", seed, "finished", value) for seed, value in enumerate(each)])
        for name, each in values.items()
    ]


@pytest.mark.parametrize(
    ("better", "arms", "verdict", "winner", "best"),
    [
        ("max", {"a": [1.0, 3.0], "b": [4.0, 5.0], "c": [0.0, 0.1]}, "clear", "b", ["b"]),
        ("min", {"a": [1.0, 3.0], "b": [4.0, 5.0], "c": [0.0, 0.1]}, "clear", "c", ["c"]),
        ("max", {"a": [1.0, 4.0], "b": [4.0, 5.0]}, "within_spread", None, ["b"]),
        ("max", {"a": [1.0, 4.5], "b": [4.0, 5.0]}, "within_spread", None, ["b"]),
        # the next arm by its mean is a, and c has a seed that is better than the worst one of b
        ("max", {"a": [3.0, 3.0], "b": [4.0, 5.0], "c": [-9.0, 4.5]}, "within_spread", None, ["b"]),
        ("min", {"a": [1.0, 4.5], "b": [4.0, 5.0]}, "within_spread", None, ["a"]),
        ("max", {"a": [1.0], "b": [2.0]}, "one_seed", "b", ["b"]),
        ("max", {"a": [1.0, None], "b": [2.0, 2.1]}, "one_seed", "b", ["b"]),
        ("max", {"a": [1.0, 1.1], "b": [2.0, None]}, "incomplete", None, ["b"]),
        # a seed that failed might have been the worst one
        ("max", {"a": [0.90, 0.91, None], "b": [0.80, 0.81, 0.82]}, "incomplete", None, ["a"]),
        ("min", {"a": [0.90, 0.91, 0.92], "b": [0.80, None, 0.82]}, "incomplete", None, ["b"]),
        ("max", {"a": [0.90, 0.91, 0.92], "b": [0.80, None, 0.82]}, "clear", "a", ["a"]),
        ("max", {"a": [0.90, 0.81, None], "b": [0.80, 0.82, 0.81]}, "within_spread", None, ["a"]),
        ("max", {"a": [1.0, 3.0], "b": [3.0, 1.0], "c": [0.0, 0.0]}, "tie", None, ["a", "b"]),
        ("max", {"a": [0.1, 0.2, 0.3], "b": [0.3, 0.1, 0.2]}, "tie", None, ["a", "b"]),
        ("max", {"a": [1.0, 2.0], "b": [None, None]}, "alone", None, ["a"]),
        ("max", {"a": [None], "b": [None]}, "no_values", None, []),
        ("max", {}, "no_values", None, []),
    ],
)
def test_a_winner_is_clear_only_beyond_the_spread_of_seeds(
    better: Any, arms: dict[str, list[float | None]], verdict: str, winner: str | None, best: list[str]
) -> None:
    found = decide(arms_of(**arms), Rule("reward_mean", better, 10))
    assert (found.verdict, found.winner, found.best) == (verdict, winner, best)


@pytest.mark.parametrize(
    ("state", "verdict"), [("unfinished", "incomplete"), ("not_started", "incomplete"), ("failed", "clear")]
)
def test_a_winner_is_not_clear_while_a_run_of_another_arm_may_overtake_it(state: Any, verdict: str) -> None:
    first, second = arms_of(a=[1.0, 1.1], b=[0.1, 0.2])
    other = Arm.of("b", {}, [*second.runs, Score("b2", 2, state, None)])
    assert decide([first, other], Rule("reward_mean", "max", 10)).verdict == verdict


def test_every_verdict_has_a_sentence() -> None:
    assert set(sweep.VERDICTS) == set(get_args(Verdict))


def test_the_figures_of_an_arm_are_those_of_the_seeds_that_have_a_value() -> None:
    first, second = arms_of(a=[1.0, None, 4.0], b=[None])
    assert (first.mean, first.least, first.largest) == (2.5, 1.0, 4.0)
    assert (second.mean, second.least, second.largest) == (None, None, None)


# ---------------------------------------------------------------- whole sweeps of jobs that a few lines play

# Ends as its config says: group_size 8 is refused, 6 crashes the first time, 7 is stopped the first time, others train.
# RUN/starts counts.
PLAYED = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
config = pathlib.Path(words[1])
run = config.parent
size = int(config.read_text().split("group_size: ")[1].split()[0])
starts = run / "starts"
starts.write_text((starts.read_text() if starts.exists() else "") + " ".join(words) + "\\n")
if size == 8 or (size == 6 and starts.read_text().count("\\n") == 1):
    print("said by the job")
    sys.exit(2 if size == 8 else 1)
if size == 7 and starts.read_text().count("\\n") == 1:
    signal.signal(signal.SIGTERM, lambda *_: ((run / "drained").touch(), sys.exit(0)))
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(300)
lines = [{"step": step, "reward_mean": size / 10} for step in range(5)]
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(run / "learner.json").write_text(json.dumps(
    {"pid": 1, "incarnation": 0, "state": "done", "policy_version": 5, "time_s": 0.0}))
(run / "model").mkdir()
(run / "model" / "config.json").touch()
"""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[str]]]:
    """Jobs are played, and reports are not drawn: the runs of each one."""
    reports: list[Sequence[str]] = []
    monkeypatch.setattr(sweep, "role_command", lambda words: [sys.executable, "-c", PLAYED, *words])
    monkeypatch.setattr(sweep, "write_report", lambda runs, folder: reports.append(runs))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield reports
    for number, handler in before.items():
        signal.signal(number, handler)


def outcome(capfd: pytest.CaptureFixture[str], code: int, *words: str) -> Any:
    capfd.readouterr()
    assert main(["sweep", *words, "--json"]) == code
    return json.loads(capfd.readouterr().out)


def starts(folder: Path) -> int:
    return (folder / "starts").read_text().count("\n") if (folder / "starts").exists() else 0


def test_runs_that_fail_are_told_and_the_same_command_runs_only_what_is_left(
    job: Path, played: list[Sequence[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(job), f"{SIZE}=8,4,6,2", "--dir", str(job.parent / "s"), "--plain"]
    sizes = {size: job.parent / "s" / f"group_size={size}" for size in (8, 4, 6, 2)}
    found = outcome(capfd, EXIT_FAILED, *words)
    assert [arm["runs"][0]["state"] for arm in found["arms"]] == ["failed", "finished", "failed", "finished"]
    assert found["failed"] == {"group_size=8": EXIT_USAGE, "group_size=6": EXIT_FAILED}
    assert [arm["mean"] for arm in found["arms"]] == [None, 0.4, None, 0.2]
    assert found["decision"] == {"verdict": "one_seed", "winner": "group_size=4", "best": ["group_size=4"]}
    assert (sizes[4] / "starts").read_text() == f"up {sizes[4]}/config.yaml --plain\n"
    again = outcome(capfd, EXIT_FAILED, *words)
    assert [arm["runs"][0]["state"] for arm in again["arms"]] == ["failed", "finished", "finished", "finished"]
    assert again["decision"]["winner"] == "group_size=6"
    assert {size: starts(folder) for size, folder in sizes.items()} == {8: 2, 4: 1, 6: 2, 2: 1}
    reported = outcome(capfd, EXIT_DONE, "--report", str(job.parent / "s"))
    assert reported == again and {size: starts(folder) for size, folder in sizes.items()}[8] == 2
    other = outcome(capfd, EXIT_DONE, "--report", str(job.parent / "s"), "--winner", "reward_mean:min:last 2")
    assert (other["rule"]["last"], other["decision"]["winner"]) == (2, "group_size=2")
    assert [len(runs) for runs in played] == [4] * 4
    assert main(["sweep", *words[:1], f"{SIZE}=4,6", *words[2:]]) == EXIT_DONE, "a part of them, in the same folder"


@pytest.mark.parametrize(
    ("run_dir", "words", "folder"),
    [
        ("~/runs/job", [], "runs/job-sweep"),
        ("runs/job/", [], "runs/job-sweep"),
        ("runs/job", ["--dir", "~/s"], "s"),
    ],
)
def test_its_folder_is_beside_the_run_that_up_would_make(
    tmp_path: Path,
    played: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
    run_dir: str,
    words: list[str],
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    job = write_job(tmp_path, run={"name": "demo", "dir": run_dir, "steps": 5})
    assert main(["sweep", str(job), f"{SIZE}=4,2", *words]) == EXIT_DONE
    assert [starts(tmp_path / folder / f"group_size={size}") for size in (4, 2)] == [1, 1]


def test_told_to_stop_it_lets_the_run_drain_and_leaves_the_others_for_the_same_command(
    job: Path, played: list[Sequence[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [str(job), f"{SIZE}=4,7,2", "--dir", str(job.parent / "s")]
    found = outcome(capfd, EXIT_DONE, *words)
    assert [arm["runs"][0]["state"] for arm in found["arms"]] == ["finished", "unfinished", "not_started"]
    assert (job.parent / "s" / "group_size=7" / "drained").exists() and found["failed"] == {}
    found = outcome(capfd, EXIT_DONE, *words)
    assert [arm["runs"][0]["state"] for arm in found["arms"]] == ["finished"] * 3
    assert [starts(job.parent / "s" / f"group_size={size}") for size in (4, 7, 2)] == [1, 2, 1]


def test_the_sentences_name_the_rule_the_arms_and_the_runs_without_a_value(
    job: Path, played: list[Sequence[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", str(job), f"{SIZE}=4,8", "--seeds", "2"]) == EXIT_FAILED
    said = capfd.readouterr().out
    folder = job.parent / "run-sweep"
    assert f"run 1 of 4, group_size=4,seed=0: starts in {folder}/group_size=4,seed=0" in said
    assert "said by the job" in said
    told = said[said.index("reward_mean (max)") :].splitlines()
    assert told[1] == "  group_size=4: 0.400 (0.400 to 0.400; 2 of 2 seeds)"
    assert told[2].endswith("0 of 2 seeds)")
    assert told[3:5] == [f"    group_size=8,seed={seed} has no value: failed" for seed in (0, 1)]
    assert told[5] == "no winner: only group_size=4 has a value"


def test_two_sweeps_of_one_folder_exclude_each_other(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with only_one(job.parent / "s" / "sweep.lock", "runs this sweep"):
        # another open file of the same process is another lock
        refusal(capsys, "sweep", str(job), f"{SIZE}=4,8", "--dir", str(job.parent / "s"))
    assert {path.name for path in (job.parent / "s").iterdir()} == {"sweep.lock"}


def test_a_folder_with_a_run_of_another_config_is_refused(
    job: Path, played: list[Sequence[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    planned(job, f"{SIZE}=4,2")[0].run.prepare(planned(job, f"{SIZE}=4,2")[0].config)
    write_job(tmp_path, learner={"optimizer": {"lr": 0.5}})
    assert LR in refusal(capsys, "sweep", str(job), f"{SIZE}=2,4", "--dir", str(tmp_path / "sweep"))
    assert not (tmp_path / "sweep" / "group_size=2").exists()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["job.yaml", "--report", "s"],
        ["--report", "nowhere"],
        ["job.yaml", "a.b=1,2", "--dry-run"],
        ["nowhere.yaml", "run.seed=1,2"],
        ["job.yaml", f"{SIZE}=4,8", "--winner", "rewrd"],
        ["job.yaml", f"{SIZE}=4,8", "--slurm"],
        ["--report", ""],
    ],
)
def test_bad_usage_is_refused_and_nothing_is_written(
    job: Path, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(job.parent))
    monkeypatch.chdir(job.parent)
    refusal(capsys, "sweep", *words)
    assert {path.name for path in job.parent.iterdir()} == {"job.yaml", "model", "train.jsonl"}


def test_on_slurm_every_run_is_checked_and_gets_its_own_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--slurm", "--dry-run", "--sbatch", "account=lab", "--dir", str(tmp_path / "s")]
    job = str(write_job(tmp_path, weights={"transport": "relay"}))
    refusal(capsys, "sweep", job, f"{SIZE}=4,1", *words)
    assert not (tmp_path / "s").exists()
    assert main(["sweep", job, f"{SIZE}=4,8", *words]) == EXIT_DONE
    for size in (4, 8):
        run = tmp_path / "s" / f"group_size={size}"
        scripts = {file.stem: file.read_text() for file in (run / "slurm").glob("*.sbatch")}
        assert set(scripts) == {"broker", "learner", "fleet"}
        assert all("--account=lab" in text and str(run) in text for text in scripts.values())
        assert (run / "keys" / "server.json").exists()
    found = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [entry["values"] for entry in found["runs"]] == [{SIZE: 4}, {SIZE: 8}]


SBATCH = """#!/bin/sh
case "$*" in *--version*|*--test-only*) exit 0;; esac
echo "$*" >> {folder}/submitted
wc -l < {folder}/submitted
"""
SQUEUE = """#!/bin/sh
cat {folder}/queue
"""


def test_on_slurm_the_same_command_submits_only_what_neither_waits_nor_is_finished(
    tmp_path: Path, played: list[Sequence[str]], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / name).write_text(script.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    (tmp_path / "queue").touch()
    words = [str(write_job(tmp_path, weights={"transport": "relay"})), f"{SIZE}=2,4,6", "--slurm"]
    runs = [tmp_path / "run-sweep" / f"group_size={size}" for size in (2, 4, 6)]
    found = outcome(capfd, EXIT_DONE, *words)
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert [sum(str(run) in line for line in submitted) for run in runs] == [3, 3, 3] and len(submitted) == 9
    assert [arm["runs"][0]["state"] for arm in found["arms"]] == ["unfinished"] * 3
    (tmp_path / "queue").write_text("2|RUNNING|N/A\n3_0|PENDING|N/A\n")
    write_record(RunDir(runs[1]), 0, "done", 5)
    (runs[1] / "model").mkdir()
    (runs[1] / "model" / "config.json").touch()
    found = outcome(capfd, EXIT_DONE, *words)
    again = (tmp_path / "submitted").read_text().splitlines()[9:]
    assert len(again) == 3 and all(str(runs[2]) in line for line in again)
    assert [arm["runs"][0]["state"] for arm in found["arms"]] == ["unfinished", "finished", "unfinished"]
