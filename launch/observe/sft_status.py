"""A warm start (slipstream sft) as `status` shows it: it has no broker, so its own files tell."""

from typing import Any

from common.config.schema import SftConfig
from common.process.lifecycle import alive
from common.process.run_dir import RunDir
from launch.observe.metrics_tail import LATEST, MetricsTail
from learner.loop.run_files import read_record


def as_json(run: RunDir, config: SftConfig) -> dict[str, Any]:
    """The machine-readable status; `learner` has the keys that an RL job's has."""
    tail, record = MetricsTail.of(run), read_record(run)
    state, live, steps = "absent", False, len(tail.lines)
    if record is not None:
        live = record.state == "running" and alive(record.pid)
        state = "training" if live else "gone" if record.state == "running" else record.state
        steps = record.policy_version if state in ("done", "drained") else steps
    return {
        "run": str(run.path.resolve()),
        "name": config.run.name,
        "kind": "sft",
        "live": live,
        "learner": {
            "pid": record.pid if record else None,
            "state": state,
            "policy_version": steps,
            "waiting_on": "",
            "since_s": 0.0,
        },
        "steps": config.run.steps,
        "loss": tail.last.get("loss"),
        "step_s": tail.mean("step_s", LATEST),
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
        text += "; the same command continues from its newest checkpoint"
    return text
