"""The outcome of a run: steps, reward, held-out accuracy, and where its model and its report are."""

from contextlib import suppress

import msgspec

from common.config.schema import Config
from common.evaluation import EvalResult
from common.process.run_dir import RunDir
from launch.observe.metrics_tail import MetricsTail, ends
from learner.loop.run_files import read_record


class Outcome(msgspec.Struct, frozen=True):
    """The figures are those of the files that are there; a run that is not finished has no model."""

    steps: int
    of: int  # run.steps
    reward: dict[str, float | None]  # means of its first and last steps
    held_out: dict[str, float] = {}  # accuracy of the final model: greedy and sampled, else by dataset
    model: str = ""
    report: str = ""

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is written."""
        return self.model != ""

    def sentence(self) -> str:
        """One line about a finished run."""
        return f"finished: {self.steps} of {self.of} steps{self.words()}"

    def words(self) -> str:
        """The figures and places, '; ' in front of each."""
        first, last = self.reward.values()
        reward = "" if first is None else f"; reward {first:.3f} (first 5 steps) to {last:.3f} (last 10)"
        return reward + self.places()

    def places(self) -> str:
        """As `words`, without the reward."""
        accuracies = ", ".join(f"{value:.3f} ({name})" for name, value in self.held_out.items())
        parts = [f"held-out accuracy {accuracies}"] * bool(accuracies)
        parts += [f"{name} in {place}" for name in ("model", "report") if (place := getattr(self, name))]
        return "".join(f"; {part}" for part in parts)


def outcome_of(run: RunDir, config: Config, tail: MetricsTail) -> Outcome:
    """The outcome by the run's files, with the metrics that `tail` has read."""
    record, folder, report = read_record(run), run.model / "config.json", run.report / "report.html"
    steps, reward = int(tail.last.get("policy_version", 0)), ends(tail.series("reward_mean"))
    if record is None or record.state != "done" or record.policy_version < config.run.steps or not folder.is_file():
        return Outcome(steps, config.run.steps, reward)
    last = [line for line in tail.evaluations if line.get("policy_version") == record.policy_version]
    held_out = {line["dataset"]: line["mean_reward"] for line in last if line.get("mean_reward") is not None}
    with suppress(OSError, ValueError):
        path = run.path / "eval.json"
        measured = msgspec.json.decode(path.read_bytes(), type=EvalResult)
        if path.stat().st_mtime >= folder.stat().st_mtime:  # it measured this model
            held_out = {"greedy": measured.greedy_accuracy, "sampled": measured.sampled_accuracy}
    places = str(run.model), str(report) if report.is_file() else ""
    return Outcome(record.policy_version, config.run.steps, reward, held_out, *places)
