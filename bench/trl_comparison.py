"""Slipstream against every way of TRL to train on a CPU: same model, task, batch and optimizer, on both cores.

    python bench/trl_comparison.py --trl-python .venv-trl/bin/python    three workloads, three seeds, five systems

`--trl-python` is the python of the environment with bench/requirements-trl.txt. Models that are missing under runs/ are
made first, as the quickstart makes them. A cell is a workload, a system and a seed. Each measured cell is a file under
runs/trl-comparison, so that the same command continues where it stopped, while commit and arguments are the same.
It first says how long it will take. With `--budget-s` it begins no cell that would end later, and exits with 1 while
some are missing.

Per seed the systems run one after the other, in changing order. SLOW ways are left out. A way that takes more
than BEHIND times as long as TRL's fastest with the first seed is not measured with the others. Measured apart are:

- the set-up, from the start of the process until training begins, for Slipstream until the first lease;
- the first step, and steady steps. Steady are those between the first three and the last two, because a window of
  asynchronous training fills and drains;
- steps and seconds to a reward.
"""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import trl_patches

PROMPTS, GROUP_SIZE = 16, 8  # a step has so many prompts, each with so many samples
OURS = "slipstream"
SYSTEMS = (OURS, *trl_patches.WAYS)
WINDOW = 2  # versions that a trained token may be behind, in all asynchronous systems
CELLS = harness.ROOT / "runs" / "trl-comparison"
THREADS = {
    "transformers": 2,
    "colocate": 2,
    "server": 2,
    "async": 1,
}  # each process has so many; asynchronous training has two processes
BEHIND = 1.5
SLOW = {
    "long_tail": ("transformers", "server", "colocate")
}  # left out: 4 to 6 times as slow as ours, a cell takes 15 min
SPARE_S = 60.0  # beyond its limit until a run is killed
PARTS = (
    "learner_idle_s", "train_s", "batch_s", "snapshot_s", "checkpoint_s", "publish_s", "seconds_to_active",
    "generation_stall_s", "staleness_mean",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """One task with its model; a level of 0 means that its model is tuned too briefly to earn reward."""

    config: str
    warm_start: str
    preset: str
    assets: str  # folder under runs/
    task: str
    steps: int
    lr: float
    max_tokens: int
    level: float = 0.0
    overrides: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return f"runs/{Path(self.warm_start).stem}/model"

    @property
    def dataset(self) -> str:
        return f"runs/{self.assets}/{self.task}/train.jsonl"


CONSTANT = ("learner.optimizer.schedule=constant", "learner.optimizer.warmup_steps=0")
ALL_SAMPLES = ("learner.dynamic_sampling=false", "learner.loss.entropy_coefficient=0", "rollout.concurrency=128")
WORKLOADS = {
    "short": Workload(
        "configs/quickstart.yaml", "configs/quickstart-sft.yaml", "tiny", "assets", "addition", steps=40, lr=3e-4,
        max_tokens=48, level=0.9, overrides=CONSTANT,
    ),
    "long_tail": Workload(
        "bench/long_tail.yaml", "bench/long-tail-sft.yaml", "long", "assets-long", "addition", steps=14, lr=1e-4,
        max_tokens=384,
    ),
    "turns": Workload(
        "configs/guessing.yaml", "configs/guessing-sft.yaml", "tiny", "assets", "number_guessing", steps=60, lr=3e-4,
        max_tokens=24, level=0.6, overrides=ALL_SAMPLES,
    ),
}  # fmt: skip


def prepare(workload: Workload) -> None:
    """Make the warm-started model unless it is there."""
    if not (harness.ROOT / workload.model / "config.json").exists():
        harness.python(
            "-m", "launch.quickstart.assets", "--out", f"runs/{workload.assets}", "--preset", workload.preset
        )
        harness.python("-m", "launch.cli", "sft", workload.warm_start)


def figures(rewards: Sequence[float], times_s: Sequence[float], level: float) -> dict[str, Any]:
    """Speed and learning; `times_s` are the ends of steps since training began."""
    steady = times_s[WINDOW : len(times_s) - WINDOW]
    step_s = (steady[-1] - steady[0]) / (len(steady) - 1)
    steps = harness.steps_to(rewards, level) if level else None
    return {
        "first_step_s": round(times_s[0], 3),
        "step_s": round(step_s, 4),
        "samples_per_s": round(PROMPTS * GROUP_SIZE / step_s, 1),
        "steps_to_level": steps,
        "seconds_to_level": round(times_s[steps - 1], 2) if steps else None,
        "reward_first_5": round(statistics.mean(rewards[:5]), 4),
        "reward_last_5": round(statistics.mean(rewards[-5:]), 4),
        "rewards": list(rewards),
        "times_s": [round(time_s, 3) for time_s in times_s],
    }


def run_trl(workload: Workload, way: str, seed: int, options: harness.Options) -> dict[str, Any]:
    words = {
        "way": way, "model": workload.model, "dataset": workload.dataset, "task": workload.task, "seed": seed,
        "steps": workload.steps, "max-tokens": workload.max_tokens, "lr": workload.lr, "threads": THREADS[way],
        "max-staleness": WINDOW, "prompts": PROMPTS, "group-size": GROUP_SIZE,
    }  # fmt: skip
    found = ask_trl(words, options)
    curve = found.pop("curve")
    known = {name: [p[name] for p in curve if name in p] for name in ("tokens_mean", "staleness_mean")}
    means = {name: round(statistics.mean(values), 3) for name, values in known.items() if values}
    rewards = [point["reward_mean"] for point in curve]
    return found | means | figures(rewards, [point["time_s"] for point in curve], workload.level)


def ask_trl(words: Mapping[str, object], options: harness.Options, **environment: str) -> dict[str, Any]:
    """The result of bench/trl_grpo.py with these options; `curve` has a point per step."""
    line = [word for name, value in words.items() for word in (f"--{name}", value)]
    script = harness.ROOT / "bench" / "trl_grpo.py"
    limit = ("timeout", "--kill-after=30", options.timeout)  # SIGTERM, so that TRL's script ends its server
    line = [options.trl_python, script, *line, "--eager"]
    output = harness.command(*limit, *line, timeout_s=options.timeout + SPARE_S, **environment)
    return next(json.loads(x[7:]) for x in output.splitlines() if x.startswith("RESULT "))


def run_ours(workload: Workload, seed: int, options: harness.Options) -> dict[str, Any]:
    run_dir = harness.scratch() / "run"
    words = {
        "run.seed": seed, "run.steps": workload.steps, "model.path": workload.model, "tasks.dataset": workload.dataset,
        "learner.optimizer.lr": workload.lr, "staleness.max": WINDOW,
    }  # fmt: skip
    overrides = [f"{name}={value}" for name, value in words.items()]
    began = time.time()
    job = harness.run(
        workload.config, run_dir, *overrides, *workload.overrides, *options.overrides, timeout_s=options.timeout
    )
    steady = job.lines[WINDOW : len(job.lines) - WINDOW]
    parts = {name: round(statistics.mean(x[name] for x in steady), 4) for name in PARTS if name in steady[0]}
    tokens = sum(line["tokens_trained"] for line in job.lines) / (PROMPTS * GROUP_SIZE * len(job.lines))
    found = {"system": OURS, "set_up_s": round(job.began_s - began, 2), "tokens_mean": round(tokens, 2), "parts": parts}
    times_s = [line["time_s"] - job.began_s for line in job.lines]
    return found | figures(job.rewards, times_s, workload.level)


class Cells(harness.Cells):
    """Measured cells on disk; a cell of another commit or other arguments only says how long it took."""

    def __init__(self, options: harness.Options) -> None:
        super().__init__(CELLS, options.overrides, [repr(w) for w in WORKLOADS.values()], THREADS)
        self.options = options

    def measure(self, workload: str, system: str, seed: int) -> None:
        began = time.monotonic()
        spec = WORKLOADS[workload]
        found = run_ours(spec, seed, self.options) if system == OURS else run_trl(spec, system, seed, self.options)
        found["load_1min"] = round(os.getloadavg()[0], 1)
        self.keep(cell_name(workload, system, seed), found, began)
        shown = {name: found[name] for name in ("set_up_s", "first_step_s", "step_s", "steps_to_level", "load_1min")}
        print(cell_name(workload, system, seed), json.dumps(shown), flush=True)

    def behind(self, workload: str, system: str, seed: int) -> bool:
        """Whether a way of TRL was so slow with the first seed that it need not be measured with this one."""
        if seed == self.options.seeds[0] or system == OURS:
            return False
        first = {way: self.found(cell_name(workload, way, self.options.seeds[0])) for way in self.options.ways}
        steps_s = {way: figures["step_s"] for way, figures in first.items() if figures}
        return system in steps_s and steps_s[system] > BEHIND * min(steps_s.values())


def ways_of(workload: str, options: harness.Options) -> list[str]:
    """The ways of TRL that are measured on a workload."""
    return [way for way in options.ways if way not in SLOW.get(workload, ())]


def cell_name(workload: str, system: str, seed: int) -> str:
    return f"{workload}-{system}-{seed}"


def measure_all(options: harness.Options) -> dict[str, dict[str, Any]]:
    """All cells by name; exits with 1 when the budget leaves some out."""
    cells = Cells(options)
    order = list[tuple[str, str, int]]()
    for turn, seed in enumerate(options.seeds):
        for workload in options.workloads:
            systems = [OURS, *ways_of(workload, options)]
            first = turn % len(systems)
            order += [(workload, system, seed) for system in [*systems[first:], *systems[:first]]]
    wanted = {cell_name(*cell): cell for cell in order}
    end = time.monotonic() + options.budget_s
    for cell in (wanted[name] for name in cells.missing([*wanted])):
        if cells.behind(*cell):
            continue
        prepare(WORKLOADS[cell[0]])
        if time.monotonic() + cells.expected_s(cell_name(*cell)) < end:
            try:
                cells.measure(*cell)
            except RuntimeError as failed:  # the others are measured all the same
                print(cell_name(*cell), failed, flush=True)
    return cells.all([name for name, cell in wanted.items() if not cells.behind(*cell)])


def compared(workload: str, seed: int, ways: Sequence[str], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One seed of a workload: every way of TRL, and the fastest one's figures over ours."""
    ours = found[cell_name(workload, OURS, seed)]
    trl = {way: found[cell_name(workload, way, seed)] for way in ways if cell_name(workload, way, seed) in found}
    fastest = min(trl, key=lambda way: trl[way]["step_s"])
    to_level = [x["seconds_to_level"] for x in (ours, *trl.values())]
    theirs = [seconds for seconds in to_level[1:] if seconds is not None]
    return {
        "workload": workload,
        "seed": seed,
        "fastest": fastest,
        "samples_ratio": round(trl[fastest]["step_s"] / ours["step_s"], 3),
        "seconds_ratio": round(min(theirs) / to_level[0], 3) if theirs and to_level[0] else None,
        "ways_ratio": {way: round(figures["step_s"] / ours["step_s"], 3) for way, figures in trl.items()},
        "ours": ours,
        "trl": trl,
    }


def row(workload: str, system: str, seeds: Sequence[int], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The medians of a system over its seeds; a level that a seed did not reach leaves None."""
    runs = [found[name] for seed in seeds if (name := cell_name(workload, system, seed)) in found]
    patches = trl_patches.names(system, WORKLOADS[workload].task) if system != OURS else []
    medians: dict[str, Any] = {"workload": workload, "system": system, "seeds": len(runs)}
    medians["patches"] = ", ".join(patches) or "none"
    for name in ("set_up_s", "first_step_s", "step_s", "samples_per_s", "steps_to_level", "seconds_to_level"):
        values = [figures[name] for figures in runs]
        medians[name] = statistics.median(values) if None not in values else None
    return medians


@harness.script(
    trl_python=str, workloads=list(WORKLOADS), ways=list(trl_patches.WAYS), seeds=[1, 2, 3], timeout=1200.0,
    budget_s=86400.0, name="trl_comparison", overrides=(),
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    found = measure_all(options)
    pairs = [compared(w, seed, options.ways, found) for w in options.workloads for seed in options.seeds]
    systems = [
        row(w, system, options.seeds, found) for w in options.workloads for system in (OURS, *ways_of(w, options))
    ]
    return {"rounds": len(options.seeds), "systems": systems, "patches": trl_patches.PATCHES, "pairs": pairs}
