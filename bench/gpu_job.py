"""The quickstart's task with learner and engine on one GPU: python bench/gpu_job.py --output FILE [--model 0.6b].

A model with random weights is warm-started by `slipstream sft`. Then the same job runs synchronously and at other
values of staleness.max: samples per second, step time, waits, and the reward over time. The first job starts alone,
since it fills vLLM's caches, then the others. Their episodes wait; then one after the other runs. A job's time counts
from the end of its first steps, which compile. The last one runs until its time is over: it is the learning curve.
The floor of an asynchronous step is the longer part of a synchronous one, generation or training.

The result has the commands and the metrics of every step. `--short` is the quickstart's own tiny model for a few steps;
without a GPU it runs on the CPU.
"""

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import msgspec
import yaml
from gpu_node import CAPTURED, DECODE, QWEN3_0_6B, attention_libraries

from common.errors import SlipstreamError
from common.process.run_dir import RunDir
from launch.checks.selftest import ENGINE_LOG, ends_of_logs
from launch.observe.observation import observe
from launch.resolve_target import Target
from launch.up.devices import interpreter
from tests.rigs.processes import Command

TINY = "tiny"
LEFT_OUT = 3  # steps at the beginning, in which kernels are compiled
KEPT = (  # metrics of a step
    "step", "time_s", "reward_mean", "reward_std", "loss", "grad_norm", "entropy", "step_s", "learner_idle_s",
    "train_s", "snapshot_s", "publish_s", "seconds_to_active", "generation_stall_s", "staleness_mean", "staleness_max",
    "mismatch_abs_mean", "length_mean", "tokens_trained", "samples", "canary_max_difference",
)  # fmt: skip
LOOK_S = 0.1


@dataclass(frozen=True)
class Size:
    """A model, how it is trained, and samples of a step."""

    shape: dict[str, Any]
    warm_lr: float
    lr: float
    kv_cache_mib: int
    groups: int = 64
    warm_steps: int = 330  # x sequences = the demonstrations, once
    sequences: int = 64
    micro_batch_tokens: int = 16384


SIZES = {
    TINY: Size({}, 3e-3, 4e-4, 64, groups=16, warm_steps=6, sequences=32),
    "50m": Size({
        "vocab_size": 128, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.02,
    }, 1e-3, 1e-4, 1024),
    "0.6b": Size(QWEN3_0_6B, 3e-4, 3e-5, 4096, micro_batch_tokens=8192),  # log-probabilities of 151,936 words each
}  # fmt: skip


def made_assets(folder: Path, size: Size, cuda: bool) -> dict[str, Any]:
    """Problems, demonstrations and the tokenizer of the quickstart, and a random model of this size."""
    import torch

    from launch.quickstart.assets import build, build_tokenizer

    build(folder, 1, TINY)
    if size.shape:
        shutil.rmtree(folder / "model")
        with torch.device("cuda" if cuda else "cpu"):
            model = harness.qwen3_model(**size.shape)
        model.to(torch.bfloat16).save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        del model
        if cuda:
            torch.cuda.empty_cache()
    return {"bytes": sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))}


def warm_started(folder: Path, size: Size, options: harness.Options, cuda: bool) -> dict[str, Any]:
    """`slipstream sft`; its result is FOLDER/sft/model."""
    words = [
        "sft", harness.ROOT / "configs/quickstart-sft.yaml", f"run.dir={folder / 'sft'}",
        f"model.path={folder / 'assets/model'}", f"model.dtype={'bfloat16' if cuda else 'float32'}",
        f"tasks.dataset={folder / 'assets/addition/sft.jsonl'}", f"run.steps={size.warm_steps}",
        f"learner.sequences_per_step={size.sequences}", f"learner.optimizer.lr={size.warm_lr}",
    ]  # fmt: skip
    began = time.perf_counter()
    harness.command(interpreter("learner")[1], "-m", "launch.cli", *words, timeout_s=options.warm_s)
    lines = harness.json_lines(folder / "sft/metrics.jsonl")
    steps = [line["step_s"] for line in lines[LEFT_OUT:]]
    return {
        "command": "slipstream " + " ".join(map(str, words)),
        "seconds": round(time.perf_counter() - began, 1),
        "step_s": round(statistics.median(steps), 4),
        "loss_first": lines[0]["loss"],
        "loss_last": lines[-1]["loss"],
    }


def config(folder: Path, size: Size, staleness: int, options: harness.Options, cuda: bool) -> Path:
    """The quickstart's config, changed for this model, device and bound; its file."""
    made = yaml.safe_load((harness.ROOT / "configs/quickstart.yaml").read_text())
    name = f"staleness-{staleness}"
    samples = size.groups * made["rollout"]["group_size"]
    data = folder / "assets/addition"
    made["run"] |= {"name": name, "dir": str(folder / name), "steps": options.steps}
    made["model"] = {"path": str(folder / "sft/model"), "dtype": "bfloat16" if cuda else "float32"}
    made["tasks"] = {
        "environment": "gated_environment:Gated", "dataset": str(data / "train.jsonl"),
        "options": {"gate": str(folder / f"{name}.gate")},
    }  # fmt: skip
    made["evaluation"]["datasets"] = [str(data / "held_out.jsonl")]
    made["staleness"]["max"] = staleness
    made["learner"] |= {"groups_per_step": size.groups, "micro_batch_tokens": size.micro_batch_tokens}
    made["learner"]["optimizer"]["lr"] = size.lr
    made["learner"]["checkpoint"]["every"] = 1 << 20
    made["rollout"]["concurrency"] = samples
    made["rollout"]["engine"] |= {"max_num_seqs": samples, "kv_cache_mib": size.kv_cache_mib}
    if cuda:
        # kernels are compiled while the first version is proven
        made["weights"] |= {"bucket_mib": 64, "timeout_s": 60.0}
        extra = {"attention_backend": options.attention} if options.attention else {}
        if not options.eager:
            captured = [*CAPTURED, *range(CAPTURED[-1] + 64, samples + 1, 64)]
            extra["compilation_config"] = DECODE | {"cudagraph_capture_sizes": captured}
        made["rollout"]["engine"] |= {"eager": options.eager, "extra": extra}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return path


@contextmanager
def jobs(
    folder: Path, size: Size, options: harness.Options, cuda: bool, part: Callable[[str, Callable[[], Any]], Any]
) -> Iterator[dict[int, Command]]:
    """All jobs, up. One that does not come up is an error of its `part`."""
    variables = {"PYTHONPATH": harness.python_path(), ENGINE_LOG: os.environ.get(ENGINE_LOG, "INFO")}
    with ExitStack() as stack:
        found = {}
        for together in (options.staleness[:1], options.staleness[1:]):
            for staleness in together:
                words = ["up", str(config(folder, size, staleness, options, cuda)), "--share-gpus", "--plain"]
                found[staleness] = stack.enter_context(Command(folder, f"up-{staleness}", *words, **variables))
            end = time.monotonic() + options.start_s
            for staleness in together:
                part(f"start_{staleness}", partial(come, folder, staleness, found[staleness], end))
        yield found


def come(folder: Path, staleness: int, command: Command, end: float) -> dict[str, float]:
    """Return when the job's node has leased tasks and its episodes wait; raises RuntimeError after monotonic `end`."""
    began = time.monotonic()
    events = folder / f"staleness-{staleness}/events.jsonl"
    while not (events.exists() and '"first_lease"' in events.read_text()):
        if command.process.poll() is not None or time.monotonic() > end:
            logs = [(folder / f"staleness-{staleness}/logs").glob(name) for name in ("[!r]*.log", "rollout-*.log")]
            said = [path.read_text(errors="replace")[-600:] for path in logs[0]]
            said += [path.read_text(errors="replace")[-5000:] for path in logs[1]]  # with what the engine says
            joined = json.dumps(join_times(folder / f"staleness-{staleness}"))
            command.__exit__()
            raise RuntimeError("\n".join([command.output()[-300:], *said, f"seconds of its node to: {joined}"]))
        time.sleep(LOOK_S)
    return {"waited_s": round(time.monotonic() - began, 1)}


def join_times(run: Path) -> dict[str, Any]:
    """When each node of a job reached each stage of its start; {} where its broker does not answer."""
    try:
        nodes = observe(Target(RunDir(run))).status.nodes
    except SlipstreamError:
        return {}
    return {node.report.node_id: msgspec.to_builtins(node.report.joined) for node in nodes}


def steps_within(metrics: Path, steps: int, seconds: float, command: Command) -> int:
    """The steps that a job has made when these are made, the seconds are over, or it has ended."""
    end = time.monotonic() + seconds
    while True:
        made = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if made >= steps or time.monotonic() >= end or command.process.poll() is not None:
            return made
        time.sleep(LOOK_S)


def run(folder: Path, size: Size, staleness: int, command: Command, options: harness.Options) -> dict[str, Any]:
    """The figures of one job, which then ends; at most the steps or seconds of the options."""
    name = f"staleness-{staleness}"
    metrics = folder / name / "metrics.jsonl"
    last = staleness == options.staleness[-1]
    most_s, steps = (options.curve_s, options.steps) if last else (options.seconds, options.compared)
    opened_s = time.time()
    (folder / f"{name}.gate").touch()
    made = steps_within(metrics, LEFT_OUT, options.compile_s, command)
    if made >= LEFT_OUT:
        steps_within(metrics, steps, most_s, command)
    joined, said = join_times(folder / name), command.output()
    command.__exit__()
    if made < LEFT_OUT:
        late = f"{made} of the first {LEFT_OUT} steps, which compile kernels, in {options.compile_s:g} s"
        raise RuntimeError(f"{late}:\n{said}{ends_of_logs(folder / name)}")
    lines = harness.json_lines(metrics) if metrics.exists() else []
    if len(lines) <= LEFT_OUT:
        raise RuntimeError(f"no step in {most_s:g} s after the first {LEFT_OUT}:\n{said}")
    return figures_of(harness.Job(folder / name, lines), opened_s, size) | {
        "command": f"slipstream up {name}.yaml --share-gpus --plain",
        "joined": joined,
        "config": yaml.safe_load((folder / f"{name}.yaml").read_text()),
        "metrics": [{key: line[key] for key in KEPT if key in line} for line in lines],
    }


def figures_of(job: harness.Job, opened_s: float, size: Size) -> dict[str, Any]:
    """The figures of a job without its first LEFT_OUT steps; `opened_s`: when its episodes began."""
    lines = job.lines[LEFT_OUT:]
    wall_s = lines[-1]["time_s"] - job.lines[LEFT_OUT - 1]["time_s"]
    middle = {name: statistics.median(line.get(name, 0.0) for line in lines) for name in KEPT if name.endswith("_s")}
    samples = sum(line.get("samples", 0) for line in lines)
    return {
        "steps": len(job.lines),
        "samples_per_s": round(samples / wall_s, 2),
        "tokens_per_s": round(sum(line["tokens_trained"] for line in lines) / wall_s, 1),
        **{name: round(middle[name], 4) for name in ("step_s", "learner_idle_s", "train_s", "publish_s")},
        "stall_per_step_ms": round(1000 * sum(line["generation_stall_s"] for line in lines) / len(lines), 2),
        "staleness_max": max(line["staleness_max"] for line in lines),
        "mismatch_abs_mean": round(statistics.mean(line["mismatch_abs_mean"] for line in lines), 7),
        "reward_first_5": job.reward(slice(5)),
        "reward_last_5": job.reward(slice(-5, None)),
        "seconds": round(job.lines[-1]["time_s"] - opened_s, 1),
    }


def floor(synchronous: dict[str, Any]) -> dict[str, float]:
    """The step time of a job whose generation and training overlap and do not slow each other down."""
    generate, train = synchronous["learner_idle_s"], synchronous["step_s"] - synchronous["learner_idle_s"]
    return {"step_s": round(max(generate, train), 4), "generate_s": round(generate, 4), "train_s": round(train, 4)}


@harness.script(
    output=str, short={"action": "store_true"}, model="50m", staleness=[0, 1, 4], compared=25, seconds=20.0,
    steps=200, curve_s=60.0, warm_s=200.0, start_s=200.0, compile_s=120.0, attention="", eager={"action": "store_true"},
)  # fmt: skip
def main(options: harness.Options) -> harness.Figures:
    import torch

    cuda = torch.cuda.is_available()
    if options.short:
        options.model, options.staleness, options.compared, options.steps = TINY, options.staleness[:2], 8, 10
        options.seconds = options.curve_s = 10.0 if cuda else 60.0
    size, folder = SIZES[options.model], harness.scratch()
    figures: harness.Figures = {"rounds": 1, "python": sys.version}
    part = partial(harness.part, options, figures)
    if cuda:
        part("attention_libraries", attention_libraries)
    part("assets", lambda: made_assets(folder / "assets", size, cuda))
    part("warm_start", lambda: warm_started(folder, size, options, cuda))
    if "error" in figures["warm_start"]:
        return figures  # which ends the script with 1: no job can learn from random weights

    with jobs(folder, size, options, cuda, part) as commands:
        for staleness, command in commands.items():
            if "error" not in figures[f"start_{staleness}"]:
                part(f"staleness_{staleness}", partial(run, folder, size, staleness, command, options))
    if "step_s" in figures.get("staleness_0", {}):
        figures["floor"] = floor(figures["staleness_0"])
    harness.keep(options, figures)
    for name, found in figures.items():
        if name.startswith("staleness_"):
            shown = {key: value for key, value in found.items() if isinstance(value, (int, float))}
            print(name, json.dumps(shown), found.get("error", ""))
    shutil.rmtree(folder, ignore_errors=True)
    return figures
