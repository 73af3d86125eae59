"""A student with a teacher and with rewards alone: samples until it is as good as the teacher, over seeds.

The student is the quickstart's warm start, whose last demonstrations are sloppy. The teacher is another model, which
saw the clean demonstrations only; `slipstream scorer` serves it with vLLM, as the node's engine is vLLM. Each way
trains the student by `slipstream up` with the quickstart's config and one change. A way has reached the teacher at the
first step where the mean reward of `WINDOW` steps is at most `MARGIN` below the teacher's accuracy on held-out
problems, sampled at temperature 1 like the rewards. Models that are in runs/ already are not made again.

    python bench/distillation.py [--seeds 1 2 3] [--steps 60]
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import yaml

TOP_K = 8
WINDOW = 3
MARGIN = 0.02
PORT = 18431
WAYS: dict[str, dict[str, Any] | None] = {  # learner.loss.distillation
    "rewards": None,
    "reverse_kl": {"teacher": "teacher", "alone": True},
    "forward_kl": {"teacher": "teacher", "objective": "forward_kl", "top_k": TOP_K, "alone": True},
}
RUNS = harness.ROOT / "runs"
STUDENT = RUNS / "quickstart-sft"
TEACHER = RUNS / "teacher-sft"
QUICKSTART = "configs/quickstart.yaml"


def make_models() -> None:
    """The quickstart's problems and warm start, and a teacher from another initialisation."""
    cli = ("-m", "launch.cli", "sft", "configs/quickstart-sft.yaml")
    for seed, folder in ((1, RUNS / "assets"), (2, RUNS / "assets-seed2")):
        harness.python("-m", "launch.quickstart.assets", "--out", folder, "--seed", seed)
    if not (STUDENT / "model" / "config.json").exists():
        harness.python(*cli, f"run.dir={STUDENT}")
    if not (TEACHER / "model" / "config.json").exists():
        model = f"model.path={RUNS / 'assets-seed2' / 'model'}"
        harness.python(*cli, f"run.dir={TEACHER}", "run.seed=2", model, "run.steps=600")  # before the sloppy ones


def config_of(way: str, folder: Path) -> Path:
    """The quickstart's config with the way's one change."""
    document = yaml.safe_load((harness.ROOT / QUICKSTART).read_text())
    told = WAYS[way]
    if told is not None:
        document["learner"]["loss"]["distillation"] = told
        serve = {"model": str(TEACHER / "model"), "dtype": "float32", "max_model_len": 256, "max_num_seqs": 64}
        serve["kv_cache_memory_bytes"] = 64 << 20
        url = f"http://127.0.0.1:{PORT}/v1"
        document["scorers"] = {"teacher": {"url": url, "model": "teacher", "kind": "teacher", "serve": serve}}
    path = folder / f"{way}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def served(config: Path, folder: Path) -> Iterator[None]:
    """The teacher behind its endpoint."""
    log = folder / "scorer.log"
    words = [sys.executable, "-m", "launch.cli", "scorer", str(config), "teacher", f"run.dir={folder / 'scorer'}"]
    with log.open("w") as out:
        role = subprocess.Popen(words, cwd=harness.ROOT, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 300
        while "is served" not in log.read_text():
            if role.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the teacher is not served: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield
    finally:
        role.send_signal(signal.SIGTERM)
        role.wait()


def reached(rewards: list[float], level: float) -> int | None:
    """Steps until the mean of WINDOW steps is at least `level`."""
    means = (statistics.mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1))
    return next((end for end, mean in enumerate(means, WINDOW) if mean >= level), None)


def trained(config: Path, way: str, run_dir: Path, *, seed: int, steps: int, level: float) -> dict[str, Any]:
    """One job's figures."""
    job = harness.run(config, run_dir, f"run.seed={seed}", f"run.steps={steps}")
    needed = reached(job.rewards, level)
    lines = job.lines
    return {
        "way": way,
        "seed": seed,
        "steps_to_teacher": needed,
        "samples_to_teacher": None if needed is None else sum(line["samples"] for line in lines[:needed]),
        "reward_first_3": job.reward(slice(WINDOW)),
        "reward_last_10": job.reward(slice(-10, None)),
        "teacher_kl_first_3": round(statistics.mean(line["teacher_kl_mean"] for line in lines[:WINDOW]), 4),
        "teacher_kl_last_10": round(statistics.mean(line["teacher_kl_mean"] for line in lines[-10:]), 4),
        "teacher_s": round(job.mean("teacher_s"), 4),
        "samples_failed": job.total("samples_failed"),
        "wall_s": round(job.wall_s, 1),
        "rewards": [round(reward, 4) for reward in job.rewards],
    }


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way, its samples in the order of the seeds."""
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        own = [run for run in runs if run["way"] == way]
        samples = [run["samples_to_teacher"] for run in own]
        rows.append({
            "way": way,
            "samples": ", ".join("never" if each is None else f"{each:,}" for each in samples),
            "reward_last_10": round(statistics.mean(run["reward_last_10"] for run in own), 3),
            "teacher_s": round(statistics.mean(run["teacher_s"] for run in own), 3),
        })  # fmt: skip
    return rows


@harness.script(seeds=[1, 2, 3], steps=60)
def main(options: harness.Options) -> harness.Figures:
    make_models()
    folder = harness.scratch()
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    configs = {way: config_of(way, folder) for way in WAYS}
    model = ("--model", TEACHER / "model")
    harness.python("-m", "launch.cli", "eval", configs["rewards"], *model, f"run.dir={folder / 'teacher'}")
    accuracy = json.loads((folder / "teacher" / "eval.json").read_text())["sampled_accuracy"]
    runs: list[dict[str, Any]] = []
    with served(configs["reverse_kl"], folder):
        for seed in options.seeds:
            for way, config in configs.items():
                told = {"seed": seed, "steps": options.steps, "level": accuracy - MARGIN}
                runs.append(trained(config, way, folder / f"{way}-{seed}", **told))
                print(way, seed, runs[-1]["samples_to_teacher"], runs[-1]["wall_s"], flush=True)
    level = {"teacher_accuracy": accuracy, "margin": MARGIN}
    return {"rounds": len(options.seeds), **level, "ways": table(runs), "runs": runs}
