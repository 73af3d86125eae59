"""slipstream status and slipstream top: who is alive, on which version, waiting on what and since when."""

import argparse
import json
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from common.config.schema import SftConfig
from common.errors import SlipstreamError
from common.metrics import SftMetrics
from common.process.logs import visible
from common.process.run_dir import RunDir
from common.run_reader import LATEST, RecentTail, known, read_recent, read_tail
from launch.observe.advisor import advice_for
from launch.observe.job_view import open_display, render_status, stalls_of
from launch.observe.observation import as_json, observe, outcome_of
from launch.resolve_target import config_of, find_target, joined_config
from learner.loop.run_files import read_record


def command(args: argparse.Namespace) -> int:
    """Print the status; of a finished job, the last one that is known."""
    job = find_target(args)
    run = job.run
    if run and (warm := config_of(run, SftConfig)) is not None:
        status = warm_start(run, warm)
        print(json.dumps(status) if args.json else visible(sentence(status)))
        return 0
    seen = observe(job)
    tail = read_recent(run and run.metrics)
    config = config_of(run) if run else None
    reached = outcome_of(run, config, tail) if run and config else None
    finished = reached if reached is not None and reached.finished else None
    advice = advice_for(tail.lines, seen.status.run.max_staleness)
    if args.json:
        found = {**as_json(run, seen, tail), "stalls": msgspec.to_builtins(stalls_of(seen))}
        found["finished"] = msgspec.to_builtins(finished)
        print(json.dumps({**found, "advice": asdict(advice) if advice else None}))
        return 0
    Console().print(render_status(run, seen, advice, finished, tail))
    return 0


def top(args: argparse.Namespace) -> int:
    """Show the live view until the job ends or Ctrl-C; it only reads, so leaving it stops nothing."""
    job = find_target(args)
    run = job.run
    seen = observe(job)
    config = config_of(run) if run else joined_config(seen.status.run.config, job.address, ())
    if config is None:
        raise SlipstreamError(f"{args.run} is not the folder of an RL job")
    tail = RecentTail(run and run.metrics)
    with suppress(KeyboardInterrupt):
        with open_display(config, tail, args.plain) as display:
            while True:
                tail.update()
                display.show(seen)
                if not seen.live:
                    break
                time.sleep(display.every_s)
                seen = observe(job, last=seen)
        print(visible(seen.note))
    return 0


def warm_start(run: RunDir, config: SftConfig) -> dict[str, Any]:
    """The status of a warm start from its files, as it has no broker; `learner` has the keys that an RL job's has."""
    tail = read_tail(run.metrics, SftMetrics)
    record = read_record(run)
    state = "absent"
    live = False
    elsewhere = ""
    pid = None
    steps = len(tail.lines)
    if record is not None:
        pid = record.pid
        live = record.state == "running" and not record.ended
        elsewhere = record.host if live and not record.runs_here else ""
        state = "training" if live else "gone" if record.state == "running" else record.state
        steps = record.policy_version if state in ("done", "drained") else steps
    learner = {"pid": pid, "state": state, "policy_version": steps, "waiting_on": "", "since_s": 0.0}
    about = {"run": str(run.path.resolve()), "name": config.run.name, "kind": "sft", "live": live, "learner": learner}
    about["elsewhere"] = elsewhere  # its machine, of whose processes this one sees none
    about |= {"steps": config.run.steps, "model": (run.model / "config.json").is_file()}
    loss = known([tail.last.loss]) if tail.last else []
    figures = {"loss": loss[0] if loss else None, "step_s": tail.mean(lambda line: line.step_s, LATEST)}
    return about | figures | {"tokens_trained": sum(line.tokens_trained for line in tail.lines)}


def sentence(status: dict[str, Any]) -> str:
    learner, loss = status["learner"], status["loss"]
    text = f"{status['name']}  {status['run']}\nwarm start: {learner['state']}"
    if status["elsewhere"]:
        text += f" on {status['elsewhere']}, as far as is known"
    text += f", step {learner['policy_version']} of {status['steps']}"
    if loss is not None:
        text += f", loss {loss:.4f}, {status['step_s']:.3f} s per step"
    if status["model"]:
        text += f"; the model is in {RunDir(status['run']).model}"
    elif learner["state"] in ("gone", "drained", "failed"):
        text += "; the same command continues from its newest checkpoint"
    return text
