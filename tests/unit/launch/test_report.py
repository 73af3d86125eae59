"""`slipstream report`: its figures, its plots, and metrics that it cannot read."""

import errno
import json
import os
from typing import Any

import pytest

from common.config.schema import Config, StalenessConfig
from common.errors import EXIT_FAILED, EXIT_USAGE
from common.metrics import StepMetrics
from common.process.run_dir import RunDir, write_json
from common.run_reader import MetricsTail, read_tail
from launch.cli import main
from launch.results.report import first_above, format_figure, summarise
from learner.loop.run_files import write_record
from tests.rigs.configs import config_of
from tests.rigs.telemetry import read_line

STEPS = 20


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(tmp_path / "run", STEPS, staleness=StalenessConfig(max=2))


@pytest.fixture
def run(run) -> RunDir:
    run.metrics.write_text("".join(json.dumps(line(step)) + "\n" for step in range(STEPS)))
    return run


def line(step: int) -> dict[str, float]:
    return {
        "step": step, "policy_version": step + 1, "time_s": 1000.0 + 2.0 * step, "reward_mean": step / STEPS,
        "staleness_mean": 1.0, "staleness_max": min(step, 2), "tokens_expired": 1, "step_s": 2.0, "learner_idle_s": 0.5,
        "train_s": 1.0, "publish_s": 0.25, "generation_stall_s": 0.01, "entropy": 1.0 / (step + 1), "ratio_mean": 1.0,
        "ratio_max": 1.0 + step, "mismatch_abs_mean": 1e-6, "drift_abs_mean": 1e-3, "correction_clip_fraction": 0.0,
        "tokens_trained": 100, "tokens_generated_total": 120 * (step + 1), "tokens_trained_total": 100 * (step + 1),
        "tokens_wasted_total": 5, "tokens_wasted_lost": 5, "seconds_wasted_lost": 1.5, "tokens_wasted_failed": 0,
        "incarnation": 0, "effective_sample_fraction": 0.9, "ratio_p1": 0.5, "ratio_p99": 2.0,
        "mismatch_by_age": [0.1, 0.2 + step, 0, 0, 0, 0.5], "tokens_by_age": [60, step, 0, 0, 0, 10],
    }  # fmt: skip


def test_summary_has_the_figures_of_the_run_and_every_plot_shows_something(run, capsys, monkeypatch):
    from matplotlib.figure import Figure

    drawn, draw = [], Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda figure, renderer: (drawn.append(figure), draw(figure, renderer)))
    write_json(run.path / "eval.json", {"greedy_accuracy": 0.99, "sampled_accuracy": 0.9, "problems": 10})
    assert main(["report", str(run.path)]) == 0
    assert len(drawn) == 2 * len(list(run.report.glob("*.png"))) == 6, "once for each of its two files"
    summary = json.loads((run.report / "summary.json").read_text())
    assert summary["run"]["steps"] == STEPS
    assert summary["run"]["seconds"] == pytest.approx(40.0)
    assert summary["reward"]["first_5_steps"] == pytest.approx(0.1)
    assert summary["reward"]["last_10_steps"] == pytest.approx(0.725)
    assert summary["reward"]["steps_to_0.9"] == 20
    assert summary["staleness"] == {"allowed": 2, "mean": 1.0, "max": 2.0, "tokens_expired": 20.0}
    assert summary["time_per_step_s"]["waiting_for_groups"] == 0.5
    assert summary["wasted"] == {"tokens_lost": 5, "seconds_lost": 1.5}
    assert summary["tokens"] == {"generated": 2400, "trained": 2000, "wasted": 5, "trained_per_s": 50.0}
    assert summary["held_out"]["greedy_accuracy"] == 0.99
    assert summary["off_policy"]["effective_sample_fraction"] == pytest.approx(0.9)
    weighted = sum((0.2 + step) * step for step in range(STEPS)) / sum(range(STEPS))
    ages = {"0": pytest.approx(0.1), "1": pytest.approx(weighted), "9 and more": pytest.approx(0.5)}
    assert summary["mismatch_by_staleness"] == ages
    out = capsys.readouterr().out
    for word in ("it learned", "first 5 steps", "0.100", "0.990 greedy", "over_steps.png"):
        assert word in out
    names = {path.name for path in run.report.glob("*.png")}
    assert names == {f"over_{axis}.png" for axis in ("steps", "samples", "tokens", "seconds")} - {"over_samples.png"}
    page = (run.report / "report.html").read_text()
    assert "it learned: reward 0.100" in page.partition("<svg")[0], "the page begins with the verdict"
    assert "Samples of several versions" not in page, "it has no points"
    titles = (
        "Reward",
        "Staleness",
        "Seconds of a step",
        "Effective sample size",
        "Tokens per second",
        "Importance ratio",
    )
    for title in titles:
        assert title in page
    for legend in ("whole", "publish", "99 %", "bound", "generated", "all trained tokens"):
        assert legend in page
    for path in run.report.glob("*.png"):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5_000, path.name


@pytest.mark.parametrize(("version", "shown"), [(STEPS, True), (STEPS - 5, False), (None, False)])
def test_the_accuracy_of_another_model_than_the_newest_is_not_shown(run, version: int | None, shown: bool):
    measured = {"greedy_accuracy": 0.99, "sampled_accuracy": 0.9, "problems": 10, "policy_version": version}
    write_json(run.path / "eval.json", measured)
    found = summarise(run, read_tail(run.metrics, StepMetrics), None)
    assert found.get("held_out", {}).get("greedy_accuracy") == (0.99 if shown else None)
    assert "policy_version" not in found.get("held_out", {})


def test_an_accuracy_without_its_version_counts_until_the_run_goes_on(run):
    write_json(run.path / "eval.json", {"greedy_accuracy": 0.99, "sampled_accuracy": 0.9, "problems": 10})
    for state in ("done", "running", "drained"):
        write_record(run, 0, state, STEPS)
        found = summarise(run, read_tail(run.metrics, StepMetrics), None)
        assert ("held_out" in found) == (state == "done")


@pytest.mark.parametrize("jump_s", [43200.0, -1800.0])
def test_the_time_of_a_run_is_that_of_its_steps_whatever_the_clock_did_between_them(run, jump_s: float):
    lines = [line(step) for step in range(STEPS)]
    for later in lines[STEPS // 2 :]:
        later["time_s"] += jump_s
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    found = summarise(run, read_tail(run.metrics, StepMetrics), None)
    assert (found["run"]["seconds"], found["tokens"]["trained_per_s"]) == (40.0, 50.0)


def points_of(name: str, lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    from launch.results.comparison import Compared, curve_of

    tail = MetricsTail(None, StepMetrics)
    tail.take(False, [read_line(**line) for line in lines])
    x, y, _, _ = curve_of([Compared.of("a", None, tail)], "steps", name)
    return list(zip(x, y, strict=True))


def test_a_plot_leaves_out_first_steps_of_learners_and_steps_that_it_has_no_value_of():
    lines = [{**line(step), "incarnation": step // 3, "step_s": 2.0 if step % 3 else 90.0} for step in range(6)]
    assert points_of("step_s", lines) == [(2, 2.0), (3, 2.0), (5, 2.0), (6, 2.0)]
    assert points_of("step_s", lines[:1]) == [(1, 90.0)]
    # the line of the same version leaves out steps without such tokens
    stale = {**line(1), "tokens_by_age": [0, 80, 0, 0, 0, 0], "mismatch_abs_mean": 0.5}
    before = {name: value for name, value in line(2).items() if name != "tokens_by_age"}
    assert points_of("mismatch_abs_mean", [line(0), stale, before]) == [(1, 1e-6), (3, 1e-6)]


def test_rates_of_tokens_follow_from_the_totals_and_leave_out_a_total_that_began_anew():
    lines = [line(0), line(1), {**line(2), "tokens_generated_total": 7}, {**line(3), "tokens_generated_total": 27}]
    assert points_of("tokens_generated_per_s", lines) == [(2, 60.0), (4, 10.0)]
    assert points_of("tokens_per_s", lines[:2]) == [(2, 50.0)]


@pytest.mark.usefixtures("one_axis")
def test_report_works_while_the_first_step_is_the_only_one(run):
    run.metrics.write_text(json.dumps(line(0)) + "\n" + '{"step": 1, "rew')
    assert main(["report", str(run.path)]) == 0
    assert json.loads((run.report / "summary.json").read_text())["run"]["steps"] == 1


def test_metrics_without_steps_or_of_another_program_fail_with_the_reason(run, capsys):
    run.metrics.unlink()
    assert main(["report", str(run.path)]) == EXIT_FAILED
    assert "no steps" in capsys.readouterr().err
    run.metrics.write_text('{"step": 0, "time_s": 1.0}\n')
    assert main(["report", str(run.path)]) == EXIT_FAILED
    assert "reward_mean" in capsys.readouterr().err
    run.metrics.unlink()
    run.metrics.mkdir()
    assert main(["report", str(run.path)]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert f"{run.metrics}: expected" in err


@pytest.mark.usefixtures("one_axis")
def test_a_report_of_lines_that_lack_what_other_releases_have(run, capsys):
    odd = dict.fromkeys(("incarnation", "step_s", "tokens_by_age", "mismatch_by_age", "samples_failed_by_reason"))
    run.metrics.write_text("".join(json.dumps({"step": n, "reward_mean": 0.5} | odd) + "\n" for n in range(3)))
    assert main(["report", str(run.path)]) == 0, capsys.readouterr().err
    found = json.loads((run.report / "summary.json").read_text())["run"]
    assert (found["steps"], found["seconds"]) == (3, None)


@pytest.mark.usefixtures("one_axis")
@pytest.mark.parametrize("name", ["summary.json", "over_steps.png", "report.html"])
def test_a_file_that_cannot_be_written_is_named_with_the_reason(run, capsys, name, monkeypatch):
    (run.report / name).mkdir(parents=True)
    assert main(["report", str(run.path)]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert f"--out: {run.report} cannot" in said and name in said
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("launch.results.report.write_json", lambda *_: (_ for _ in ()).throw(full))
    assert main(["report", str(run.path)]) == EXIT_FAILED
    assert "[Errno 28]" in capsys.readouterr().err


def test_report_without_matplotlib_says_what_to_install(run, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(run.path)]) == EXIT_USAGE
    assert "matplotlib" in capsys.readouterr().err


def test_figures_are_readable_and_steps_count_until_a_reward_is_kept():
    assert first_above([0.0, 1.0, 0.0, 0.9, 0.9, 0.9], 0.9) == 6
    assert first_above([0.5] * 9, 0.9) is None
    assert format_figure(None) == "-"
    assert format_figure(1234567) == "1,234,567"
    assert format_figure(0.25) == "0.250"
    assert format_figure(2.5e-7) == "2.50e-07"
    assert format_figure("demo") == "demo"
