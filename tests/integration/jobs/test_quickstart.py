"""The quickstart with all roles on one device: warm start, then the job. `slipstream selftest` lets it learn."""

import os
import statistics
from pathlib import Path

from launch.up.devices import interpreter
from tests.integration.megatron.test_megatron_parity import Record
from tests.rigs.device import CUDA
from tests.rigs.jobs import metrics
from tests.rigs.processes import ROOT, Process

STEPS = int(os.environ.get("SLIPSTREAM_TEST_STEPS", "2"))
LEARNS = 40  # steps in which the reward must rise
SHORT = ["run.steps=4"]  # a warm start for a job that only has to run


def run(log: Path, *words: str) -> None:
    """A command of the learner's environment that must succeed."""
    with Process(log, [interpreter("learner")[1], "-m", "launch.cli", *words]) as command:
        assert command.wait() == 0, command.output()


def test_the_quickstart_learns_with_all_roles_on_one_device(
    tmp_path: Path, assets: Path, record_property: Record
) -> None:
    sft, job, configs = tmp_path / "sft", tmp_path / "job", ROOT / "configs"
    dtype, data = f"model.dtype={'bfloat16' if CUDA else 'float32'}", assets / "addition"
    start = ["sft", str(configs / "quickstart-sft.yaml"), f"run.dir={sft}", f"model.path={assets / 'model'}", dtype]
    run(tmp_path / "sft.log", *start, f"tasks.dataset={data / 'sft.jsonl'}", *(SHORT if STEPS < LEARNS else ()))
    words = [f"run.dir={job}", f"model.path={sft / 'model'}", dtype, f"run.steps={STEPS}"]
    words += [f"tasks.dataset={data / 'train.jsonl'}", f"evaluation.datasets=[{data / 'held_out.jsonl'}]"]
    if CUDA:  # kernels are compiled while the first version is proven
        words += ["weights.timeout_s=60"]
    run(tmp_path / "job.log", "up", str(configs / "quickstart.yaml"), *words, "--share-gpus", "--plain")
    lines = metrics(job)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert max(line["staleness_max"] for line in lines) <= 2
    first, last = (statistics.mean(line["reward_mean"] for line in part) for part in (lines[:5], lines[-5:]))
    assert STEPS < LEARNS or last > max(0.7, first + 0.1), f"reward {first:.2f}, then {last:.2f}"
    figures = {"reward of the first and last 5 steps": f"{first:.2f}, {last:.2f}"}
    for name in ("step_s", "publish_s", "learner_idle_s", "mismatch_abs_mean"):
        figures[f"median {name}"] = f"{statistics.median(line[name] for line in lines):.3g}"
    for name, value in figures.items():
        record_property(name, value)
