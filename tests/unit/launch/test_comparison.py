"""`slipstream report` of several runs: what is one curve, what each axis counts, and a page that stands alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from common.config.schema import Config, ModelConfig, RunConfig, SftConfig, SftTasksConfig, StalenessConfig
from common.errors import EXIT_FAILED
from common.metrics import StepMetrics
from common.process.run_dir import RunDir
from common.run_reader import read_tail
from launch.cli import main
from launch.results.comparison import Compared, curve_of, evaluated, grouped
from tests.rigs.configs import config_of, prepared, refusal
from tests.unit.launch.test_report import line

STEPS = 6
FILES = {"report.html", "summary.json", *(f"over_{axis}.png" for axis in ("steps", "samples", "tokens", "seconds"))}


def made(folder: Path, name: str, steps: int = STEPS, seed: int = 0, shift: float = 0.0, **sections: Any) -> RunDir:
    """A run whose reward is step / 20 + shift, with 4 samples and 100 tokens in each of its steps of 2 s."""
    config = config_of(folder / name, **sections)
    run = prepared(
        msgspec.structs.replace(config, run=RunConfig(name=name, dir=str(folder / name), steps=9, seed=seed))
    )
    lines = ({**line(step), "samples": 4, "reward_mean": step / 20 + shift} for step in range(steps))
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run


def loaded(run: RunDir, points: int = 128) -> Compared:
    config = msgspec.convert(__import__("yaml").safe_load(run.config.read_text()), Config)
    return Compared.of(run.path.name, config, read_tail(run.metrics, StepMetrics), points=points)


def test_runs_whose_configs_differ_only_in_seed_name_and_folder_are_one_curve_with_a_band(tmp_path: Path) -> None:
    runs = [loaded(made(tmp_path, f"seed-{n}", seed=n, shift=shift)) for n, shift in enumerate((0.0, 0.1, 0.5))]
    other = loaded(made(tmp_path, "other", staleness=StalenessConfig(max=7)))
    assert [[run.label for run in group] for group in grouped([runs[0], other, *runs[1:]])] == [
        ["seed-0", "seed-1", "seed-2"], ["other"],
    ]  # fmt: skip
    x, mean, low, high = curve_of(runs, "steps", "reward_mean")
    np.testing.assert_allclose(x, range(1, STEPS + 1))
    np.testing.assert_allclose(mean, np.arange(STEPS) / 20 + 0.2)
    np.testing.assert_allclose(low, np.arange(STEPS) / 20)
    np.testing.assert_allclose(high, np.arange(STEPS) / 20 + 0.5)


@pytest.mark.parametrize(("axis", "per_step"), [("steps", 1), ("samples", 4), ("tokens", 100), ("seconds", 2.0)])
def test_an_axis_counts_from_the_start_of_the_run(tmp_path: Path, axis: str, per_step: float) -> None:
    x, y, _, _ = curve_of([loaded(made(tmp_path, "a"))], axis, "reward_mean")
    np.testing.assert_allclose(x, per_step * np.arange(1, STEPS + 1))
    np.testing.assert_allclose(y, np.arange(STEPS) / 20)


def test_a_seed_that_ended_early_leaves_the_curve_to_the_others(tmp_path: Path) -> None:
    runs = [loaded(made(tmp_path, "long")), loaded(made(tmp_path, "short", steps=3, seed=1, shift=0.2))]
    _, mean, low, high = curve_of(runs, "steps", "reward_mean")
    np.testing.assert_allclose(mean, [0.1, 0.15, 0.2, 0.15, 0.2, 0.25])
    np.testing.assert_allclose(high[3:], low[3:])


def test_a_long_run_becomes_means_of_successive_steps_at_the_place_of_the_last(tmp_path: Path) -> None:
    run = made(tmp_path, "a", steps=7)
    lines = run.metrics.read_text().splitlines()
    run.metrics.write_text("\n".join([*lines[:6], lines[6].replace('"reward_mean"', '"elsewhere"')]) + "\n")
    x, y, _, _ = curve_of([loaded(run, points=4)], "steps", "reward_mean")
    assert (x.tolist(), y.tolist()) == ([2, 4, 6], [pytest.approx(0.025), pytest.approx(0.125), pytest.approx(0.225)])


def test_metrics_of_an_older_version_have_no_curve_where_they_have_no_number(tmp_path: Path) -> None:
    run = made(tmp_path, "old")
    run.metrics.write_text(run.metrics.read_text().replace('"samples"', '"something"'))
    assert curve_of([loaded(run)], "samples", "reward_mean") is None
    assert curve_of([loaded(run)], "steps", "reward_mean") is not None
    assert curve_of([loaded(run)], "steps", "length_mean") is None


def teach(run: RunDir) -> None:
    """Give its lines a number of an environment, but for the first."""
    lines = [json.loads(each) for each in run.metrics.read_text().splitlines()]
    for step, each in enumerate(lines):
        each["environment"] = {"right$": step / 4} if step else {}
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_an_environment_s_own_numbers_have_curves_in_the_runs_that_know_them(tmp_path: Path) -> None:
    runs = [made(tmp_path, name, steps=3) for name in ("a", "b")]
    teach(runs[0])
    known, unknown = map(loaded, runs)
    x, y, _, _ = curve_of([known, unknown], "steps", "environment/right$")
    assert (x.tolist(), y.tolist()) == ([2, 3], [0.25, 0.5])
    assert curve_of([unknown], "steps", "environment/right$") is None


def evaluation(version: int, reward: float, **more: Any) -> str:
    known = {
        "kind": "evaluation",
        "step": version,
        "policy_version": version,
        "dataset": "held<out>",
        "mean_reward": reward,
    }
    return json.dumps(known | more) + "\n"


def test_evaluations_have_their_interval_or_the_spread_of_seeds_at_their_version(tmp_path: Path) -> None:
    runs = []
    for name, seed, reward in (("a", 0, 0.4), ("b", 1, 0.8)):
        run = made(tmp_path, name, seed=seed)
        first = evaluation(0, 0.1, mean_reward_low=None)
        more = evaluation(4, reward, mean_reward_low=reward - 0.1, mean_reward_high=reward + 0.2)
        run.metrics.write_text(more + run.metrics.read_text() + first)
        runs.append(loaded(run))
    x, y, low, high = evaluated(runs[:1], "tokens", "held<out>")
    np.testing.assert_allclose([x, y, low, high], [[0, 400], [0.1, 0.4], [0.1, 0.3], [0.1, 0.6]])
    x, y, low, high = evaluated(runs, "steps", "held<out>")
    np.testing.assert_allclose([x, y, low, high], [[0, 4], [0.1, 0.6], [0.1, 0.4], [0.1, 0.8]])
    assert evaluated(runs, "steps", "another") is None


# ---------------------------------------------------------------- the command


class Page(HTMLParser):
    """The page as a browser finds it: tags, addresses to ask for, and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asked += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data

    def assert_stands_alone(self) -> None:
        assert not {"script", "link", "iframe", "object", "img", "b"} & set(self.tags)
        assert [address for address in self.asked if not address.startswith("#")] == []
        assert not re.search(r"@import|url\((?!#)", self.text)


def test_several_runs_are_written_side_by_side_into_one_page_with_the_differences_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [made(tmp_path, "a", seed=0), made(tmp_path, "b", seed=1, shift=0.3)]
    runs.append(made(tmp_path, "<b>c & $x_1$", staleness=StalenessConfig(max=7)))
    teach(runs[0])
    runs[0].metrics.write_text(runs[0].metrics.read_text() + evaluation(2, 0.5) + '{"step": 9, "rew')
    (tmp_path / "report").mkdir()
    assert main(["report", *(str(run.path) for run in runs)]) == 0
    folder = tmp_path / "report-2"
    page = Page(folder / "report.html")
    page.assert_stands_alone()
    assert page.text.index("staleness.max") < page.text.index("Curves") < page.text.index("reward: last 10 steps")
    for words in (
        "<b>c & $x_1$",
        "right$",
        "a and 1 more, seeds 0, 1",
        "least to the largest",
        "Evaluation on held<out>",
    ):
        assert words in page.text
    assert page.tags.count("input") == 4 and "currentColor" in (folder / "report.html").read_text()
    for axis in ("steps", "samples", "tokens", "seconds"):
        assert (folder / f"over_{axis}.png").read_bytes().startswith(b"\x89PNG")
    assert "Reward" in page.text and "Divergence" not in page.text, "it is 0 everywhere"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["runs"]["b"]["reward"]["first_5_steps"] == pytest.approx(0.4)
    assert summary["differences"] == [
        ["", "a", "b", "<b>c & $x_1$"], ["run.seed", "0", "1", "0"], ["staleness.max", "2", "2", "7"],
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "staleness.max" in out and "report-2/report.html" in out
    for run in runs:
        assert not run.report.exists()
    assert_pictures_are_whole_and_no_two_share_an_id(folder / "report.html")


def assert_pictures_are_whole_and_no_two_share_an_id(page: Path) -> None:
    pictures = re.findall(r"<figure[^>]*>(.*?)</figure>", page.read_text(), re.DOTALL)
    assert len(pictures) == 4
    found: set[str] = set()
    for picture in pictures:
        ElementTree.fromstring(picture.replace("xlink:href", "href"))
        ids = set(re.findall(r'\bid="([^"]+)"', picture))
        clips = {name for name in ids if re.fullmatch(r"[a-z][0-9a-f]{10}", name)}
        assert clips and not clips & found
        found |= clips
        assert set(re.findall(r"url\(#([^)]+)\)", picture)) <= ids


def test_one_run_gets_a_page_of_its_own(tmp_path: Path) -> None:
    run = made(tmp_path, "<i>x")
    run.metrics.write_text(run.metrics.read_text() + evaluation(2, 0.5, pass_at={"1": 0.5, "4": 0.75}))
    assert main(["report", str(run.path)]) == 0
    page = Page(run.report / "report.html")
    page.assert_stands_alone()
    assert "<i>x" in page.text and "reward: last 10 steps" in page.text
    assert "Evaluation on held<out>" in page.text
    assert {path.name for path in run.report.iterdir()} == FILES


def test_a_run_without_steps_named_twice_or_without_its_config_is_said_and_equal_names_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = made(tmp_path / "x", "a"), made(tmp_path / "y", "a", seed=3)
    bare, empty, out = made(tmp_path, "bare"), made(tmp_path, "empty", steps=0), str(tmp_path / "out")
    bare.config.unlink()
    for run in (one, two, bare):  # an older version did not count samples
        run.metrics.write_text(run.metrics.read_text().replace('"samples"', '"something"') + evaluation(2, 0.5))
    assert main(["report", *(str(run.path) for run in (one, one, empty, two, bare)), "--out", out]) == 0
    assert f"{empty.path} has no steps yet." in capsys.readouterr().out.replace("\n", "")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(summary["runs"]) == [f"a ({one.path})", f"a ({two.path})", "bare"]
    assert summary["differences"][1] == ["run.seed", "0", "3", "-"]
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == {"over_steps", "over_tokens", "over_seconds"}
    assert main(["report", str(empty.path), str(empty.path / ".." / "empty"), "--out", out]) == EXIT_FAILED
    assert "none of" in capsys.readouterr().err
    unused = tmp_path / "unused"
    assert main(["report", str(empty.path), str(made(tmp_path, "new", steps=0).path), "--out", str(unused)]) == 1
    assert not unused.exists()


def test_a_warm_start_beside_an_rl_job_and_a_folder_inside_of_a_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = made(tmp_path, "a"), made(tmp_path, "b")
    warm = warm_start(tmp_path / "warm")
    said = refusal(capsys, "report", str(run.path), str(warm.path))
    assert str(warm.path) in said and str(run.path) in said
    monkeypatch.chdir(other.logs)
    said = refusal(capsys, "report", str(run.path), str(other.path))
    assert str(other.path) in said and "with --out" in said
    (tmp_path / "file").touch()
    said = refusal(capsys, "report", str(run.path), str(other.path), "--out", str(tmp_path / "file" / "folder"))
    assert "--out: expected" in said and str(tmp_path / "file" / "folder") in said


def warm_start(folder: Path, steps: int = STEPS) -> RunDir:
    run = RunConfig(name=folder.name, dir=str(folder), steps=9)
    config = SftConfig(run=run, model=ModelConfig(path="m"), tasks=SftTasksConfig(dataset="d"))
    found = prepared(config)
    lines = [
        {"step": n, "time_s": n, "loss": 1 / (n + 1), "grad_norm": 1, "lr": 1, "tokens_trained": 10, "step_s": 1}
        for n in range(steps)
    ]
    lines[1]["validation_loss"] = lines[5]["validation_loss"] = 0.7
    found.metrics.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return found


@pytest.mark.usefixtures("one_axis")
def test_warm_starts_are_compared_and_show_the_loss_of_held_out_rows(tmp_path: Path) -> None:
    runs = [warm_start(tmp_path / "one"), warm_start(tmp_path / "two")]
    assert main(["report", *(str(run.path) for run in runs), "--out", str(tmp_path / "out")]) == 0
    assert "Loss of held-out rows" in Page(tmp_path / "out" / "report.html").text
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]["one"]["validation_loss"]["last"] == 0.7
    assert main(["report", str(runs[0].path)]) == 0
    assert "held-out rows" in Page(runs[0].report / "report.html").text


def test_a_long_run_is_drawn_in_a_bounded_number_of_points(tmp_path: Path) -> None:
    run = made(tmp_path, "long", steps=1001)
    lines = [json.loads(text) for text in run.metrics.read_text().splitlines()]
    changed = [each | {"staleness_mean": n % 10, "staleness_max": n % 10} for n, each in enumerate(lines)]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in changed) + evaluation(5, 0.5))
    long = loaded(run, points=126)
    x, y, _, _ = curve_of([long], "steps", "staleness_mean")
    assert (len(x), x[0], y[0], x[-1]) == (126, 8, 3.5, 1001)
    assert curve_of([long], "steps", "staleness_max")[1][0] == 7, "a maximum stays one"
    assert evaluated([long], "tokens", "held<out>")[0] == 500, "between the points, too"
    assert main(["report", str(run.path), "--out", str(tmp_path / "else")]) == 0
    assert {path.name for path in (tmp_path / "else").iterdir()} == FILES and not run.report.exists()
    page = (tmp_path / "else" / "report.html").read_text()
    assert page.count("every point is the mean of 2 steps") == 5, "in a note, and in each of four pictures"
    assert "mean of 5 points" in page
