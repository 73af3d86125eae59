"""The ranks behind test_export.py: run folders with a checkpoint, and what the learner makes of some documents."""

from pathlib import Path
from typing import Any

from tests.integration import fork_rig, tiny_models

STEPS = 2


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    tiny_models.make(folder / "models" / spec["kind"], spec["kind"])


def job_train(folder: Path, spec: dict[str, Any]) -> None:
    """A run folder as the training loop leaves it, with one checkpoint."""
    from common.config.schema import Config, LearnerConfig, ModelConfig, ParallelConfig, RunConfig, TasksConfig
    from common.process.run_dir import RunDir
    from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState

    backend = tiny_models.backend(folder, spec)
    for number in range(STEPS):
        tiny_models.step(backend, number)
    run = RunDir(folder / spec["name"])
    checkpoints = CheckpointFolder(run.checkpoints, keep=1)
    begun = b""
    if backend.rank == 0:
        run.prepare(
            Config(
                run=RunConfig(name=spec["name"], dir=str(run.path), steps=9),
                model=ModelConfig(path=str(folder / "models" / spec["kind"]), dtype=spec.get("dtype", "float32")),
                tasks=TasksConfig(environment="none", dataset="none"),
                learner=LearnerConfig(world_size=2, parallel=ParallelConfig(**spec["parallel"])),
            )
        )
        begun = str(checkpoints.begin(STEPS)).encode()
    tiny_models.save(backend, Path(backend.broadcast_bytes(begun if backend.rank == 0 else None).decode()))
    if backend.rank == 0:
        checkpoints.finish(TrainerState(policy_version=STEPS, incarnation=0, tasks=StreamState()))
    rows = backend.logprobs(tiny_models.share(backend, 0), tiny_models.TEMPERATURE)
    size, rank = backend.data_parallel_size, backend.data_parallel_rank
    tensors = {f"logprobs.{i * size + rank}": row for i, row in enumerate(rows)}
    tensors |= {f"weight.{n}": t.clone() for n, t in backend.export()}
    fork_rig.write(folder / "found" / spec["name"], backend.rank, tensors, {})


JOBS = {"models": job_models, "train": job_train}
