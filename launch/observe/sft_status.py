"""A warm start (slipstream sft) as `status` and `report` show it: it has no broker, so its own files tell."""

from typing import Any

from common.config.loading import load_either
from common.config.schema import SftConfig
from common.process.lifecycle import alive
from common.process.run_dir import RunDir
from launch.observe.metrics_tail import LAST_STEPS, MetricsTail, ends, mean
from learner.loop.learner_record import read_record


def warm_start_of(run: RunDir) -> SftConfig | None:
    """The resolved config in a run folder; None when there is none or it is an RL job's."""
    if not run.config.exists():
        return None
    config = load_either(run.config)
    return config if isinstance(config, SftConfig) else None


def as_json(run: RunDir, config: SftConfig) -> dict[str, Any]:
    """The machine-readable status; `learner` has the keys that an RL job's has."""
    tail = MetricsTail(run.metrics)
    tail.update()
    record = read_record(run)
    state, live = "absent", False
    if record is not None:
        live = record.state == "running" and alive(record.pid)
        state = "training" if live else "gone" if record.state == "running" else record.state
    last = tail.lines[-1] if tail.lines else {}
    done = record.policy_version if record is not None and record.state in ("done", "drained") else len(tail.lines)
    return {
        "run": str(run.path.resolve()),
        "name": config.run.name,
        "kind": "sft",
        "live": live,
        "learner": {
            "pid": record.pid if record else None,
            "state": state,
            "policy_version": done,
            "waiting_on": "",
            "since_s": 0.0,
        },
        "steps": config.run.steps,
        "loss": last.get("loss"),
        "step_s": mean(tail.series("step_s")[-LAST_STEPS:]),
        "tokens_trained": sum(tail.series("tokens_trained")),
        "model": (run.model / "config.json").is_file(),
    }


def line(status: dict[str, Any]) -> str:
    """The status in words."""
    learner, loss = status["learner"], status["loss"]
    text = f"{status['name']}  {status['run']}\nwarm start: {learner['state']}, "
    text += f"step {learner['policy_version']} of {status['steps']}"
    if loss is not None:
        text += f", loss {loss:.4f}, {status['step_s']:.3f} s per step"
    if status["model"]:
        text += "; the model is written"
    elif learner["state"] in ("gone", "drained", "failed"):
        text += "; the same command goes on from its newest checkpoint"
    return text


def summarise(config: SftConfig, tail: MetricsTail) -> dict[str, Any]:
    """The figures of the whole run, in the sections of the report's table."""
    losses, seconds = tail.series("loss"), sum(tail.series("step_s"))
    trained = sum(tail.series("tokens_trained"))
    return {
        "run": {"name": config.run.name, "steps": len(tail.lines), "seconds": seconds},
        "loss": {**ends(losses), "lowest": min(losses, default=None)},
        "time_per_step_s": {"step": mean(tail.series("step_s"))},
        "tokens": {
            "trained": trained,
            "processed": sum(tail.series("sequence_tokens")),
            "trained_per_s": trained / seconds if seconds else None,
        },
    }
