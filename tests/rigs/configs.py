"""Builders for tests of the commands: a job's files and config, its run folder, a broker and its status, refusals."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from rich.console import Console

from broker.contract import BrokerStatus, LearnerReport, NodeReport, NodeStatus, RunInfo
from broker.main import run_info
from broker.server.server import BrokerServer
from common.config.architecture import Architecture, read_architecture
from common.config.converted import MANIFEST, WEIGHTS, Converted, config_digest
from common.config.loading import build_config
from common.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from common.errors import EXIT_USAGE
from common.process.run_dir import RunDir, write_json
from common.waits import WaitFor, WaitKind
from launch.cli import main
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState
from tests.rigs.brokers import new_state, serving
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S

MODELS = ROOT / "configs" / "models"
HEAVY = {"torch", "vllm", "megatron", "transformers", "matplotlib"}
SHAPE = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
SHAPE |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 1024}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
RUN_INFO = RunInfo("demo", "/runs/demo", 4, 1, 3, 60.0, 1 << 20, b"{}")
LEARNER = LearnerReport(
    11, 0, "waiting", 7, WaitFor(WaitKind.GROUPS, version=7, count=1, of=4), 2.5, step=7, groups_missing=3
)
NODE = NodeReport("node-0", 12, "here", "generating", 6, since_s=1.0, tokens_generated=500, tokens_per_s=1234.0)


def model_folder(folder: Path, **entries: object) -> Path:
    """A model folder that passes the checks; `entries` are more of its config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **entries}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def converted_folder(folder: Path, **entries: object) -> Path:
    """As `model_folder`, with weights as `slipstream convert` leaves them; no learner could read these."""
    (model_folder(folder, **entries) / "model.safetensors").unlink()
    weights = folder / WEIGHTS
    weights.mkdir()
    files = {"__0_0.distcp": 40, ".metadata": 7}
    for name, size in files.items():
        (weights / name).write_bytes(bytes(size))
    made = Converted(
        source="/models/it", dtype="bfloat16", config=config_digest(folder), weights="1", names=["a"], files=files
    )
    (weights / MANIFEST).write_bytes(msgspec.json.encode(made))
    return folder


def write_distribution(site_packages: Path, name: str, version: str) -> None:
    """The metadata of an installed package."""
    folder = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def architecture(name: str) -> Architecture:
    return read_architecture(json.loads((MODELS / name / "config.json").read_text()))


def document_of(folder: Path, **sections: Any) -> dict[str, Any]:
    """A job whose model and dataset are in `folder`, made unless they are there; `sections` add or replace keys."""
    if not (folder / "model").exists():
        model_folder(folder / "model")
        (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    document: dict[str, Any] = {
        "run": {"name": "demo", "dir": str(folder / "run"), "steps": 5},
        "model": {"path": str(folder / "model")},
        "tasks": {"environment": "addition", "dataset": str(folder / "train.jsonl")},
        "rollout": {"max_tokens": 100, "engine": {"max_model_len": 512}},
    }
    return document | {name: {**document.get(name, {}), **section} for name, section in sections.items()}


def job_of(folder: Path, **sections: Any) -> Config:
    return build_config(document_of(folder, **sections), "job.yaml")


def write_job(folder: Path, **sections: Any) -> Path:
    (folder / "job.yaml").write_text(yaml.safe_dump(document_of(folder, **sections)))
    return folder / "job.yaml"


def config_of(run_dir: Path, steps: int = 10, **sections: Any) -> Config:
    """A config for tests that look at nothing but its run folder."""
    run, tasks = RunConfig(name="demo", dir=str(run_dir), steps=steps), TasksConfig(environment="addition", dataset="d")
    return msgspec.structs.replace(Config(run=run, model=ModelConfig(path="m"), tasks=tasks), **sections)


def prepared(config: Any) -> RunDir:
    run = RunDir(config.run.dir)
    run.prepare(config)
    return run


def node_status(name: str = "node-0", alive: bool = True, waste: Any = None, **report: Any) -> NodeStatus:
    return NodeStatus(msgspec.structs.replace(NODE, node_id=name, **report), 2, alive, 0.2, waste=waste or {})


def status_of(*nodes: NodeStatus, **changes: Any) -> BrokerStatus:
    """The status of a job whose learner waits."""
    facts: dict[str, Any] = dict(
        pid=10, address="tcp://127.0.0.1:5", run=RUN_INFO, groups_pending=3, groups_ready=1, groups_leased=2,
        groups_taken=0, groups_committed=28, groups_dead=0, bytes_held=100, lease_expiries=0, stale_results=0,
        tokens_generated_total=500, tokens_wasted_total=0, learner=LEARNER, learner_last_seen_s=0.5, nodes=list(nodes),
    )  # fmt: skip
    return BrokerStatus(**(facts | changes))


def write_broker(run: RunDir, pid: int | None = None, address: str = "ipc:///nobody/listens/here") -> None:
    """RUN/broker.json of a broker with this process's pid unless another one is given."""
    write_json(run.broker_json, {"pid": pid or os.getpid(), "address": address, "started_s": time.time()})


@contextmanager
def living_broker(
    config: Config, credentials: str | None = None, handed_out: bytes | None = None, run_id: str = ""
) -> Iterator[BrokerServer]:
    """A real broker on a thread, found through RUN/broker.json; `handed_out` takes the place of its config."""
    info = run_info(config, msgspec.json.encode(config) if handed_out is None else handed_out, run_id)
    with serving(state=new_state(info), credentials=credentials) as server:
        write_broker(RunDir(config.run.dir), address=server.address)
        yield server


def text_of(renderable: object, width: int = 200) -> str:
    out = StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The output of a command that succeeds, with --json."""
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run a command that must be refused; returns its one line on stderr."""
    assert main(words) == EXIT_USAGE
    err = capsys.readouterr().err.strip()
    assert err.startswith(f"slipstream {words[0]}: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in err
    return err


def run_cli(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def imported_by(code: str) -> set[str]:
    """The modules that a new interpreter has imported after `code`."""
    command = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules, file=sys.stderr)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=ROOT)
    return set(done.stderr.split())


def write_checkpoint(run: RunDir, step: int) -> Path:
    """RUN/checkpoints/step-N as the learner leaves it."""
    folder = CheckpointFolder(run.checkpoints, keep=99)
    model = folder.begin(step)
    model.mkdir()
    (model / "weights").write_bytes(b"w" * 3)
    return folder.finish(TrainerState(policy_version=step, incarnation=0, tasks=StreamState()))
