"""TensorBoard, W&B, MLflow and Trackio as sinks (launch/sinks/process.py). Each library is imported when it is used."""

# pyright: reportMissingImports=false
# The libraries come with the extra 'sinks', which few environments have.

import os
import re
import time
from collections.abc import Sequence

import msgspec

from launch.sinks.feed import Cursor, FedRun, Point, leaves

PROJECT = "slipstream"
BY_ID = ("wandb", "mlflow", "trackio")  # these know a run by FedRun.id, wherever its folder is
WANDB_FLUSH_S = 0.1
WANDB_STEPS = 16  # numbers of W&B's own step per step of the run; those between are for evaluations


class TensorBoard:
    """Event files in RUN/tensorboard; evaluations are a run of their own, because they come behind the steps."""

    def __init__(self, job: FedRun, cursor: Cursor) -> None:
        self._folders = [str(job.run.path / "tensorboard" / name) for name in ("", "evaluation")]
        self._open(cursor.step + 1)

    def _open(self, step: int) -> None:
        """Begin new event files. Readers drop what earlier ones have from `step` on, and evaluations behind it."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writers = [EventFileWriter(folder) for folder in self._folders]
        for writer, void_from in zip(self._writers, (step, step + 1), strict=True):
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START), step=void_from))

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            if point.again:
                self.close()
                self._open(point.step)
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            event = Event(summary=Summary(value=values), step=point.step, wall_time=point.time_s)
            self._writers[bool(point.dataset)].add_event(event)
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Wandb:
    """Weights & Biases, as its environment variables say; WANDB_MODE=offline writes RUN/wandb."""

    def __init__(self, job: FedRun, cursor: Cursor) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        quiet = {"console": "off", "silent": True, "x_disable_stats": True}
        settings = wandb.Settings(**quiet, x_transaction_log_flush_interval=WANDB_FLUSH_S)
        named = {"project": project, "name": job.config.run.name, "id": job.id, "dir": str(job.run.path)}
        self._run = wandb.init(**named, resume="allow", config=msgspec.to_builtins(job.config), settings=settings)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluation/*", step_metric="policy_version")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            number = point.step * WANDB_STEPS
            if point.dataset:
                self._run.log({"policy_version": point.step, **point.values})
            elif number >= self._run.step:  # W&B's history takes no step twice
                self._run.log({"step": point.step, **point.values}, step=number, commit=True)
        self._run.summary.get("step")  # W&B's own process answers when it has handled all of the above
        time.sleep(2 * WANDB_FLUSH_S)  # by then it has written its file, which survives a kill

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, else in RUN/mlflow.db."""

    def __init__(self, job: FedRun, cursor: Cursor) -> None:
        import mlflow

        self._mlflow = mlflow
        default = f"sqlite:///{job.run.path.resolve()}/mlflow.db"
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", default))
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        same = mlflow.search_runs(filter_string=f"tags.`slipstream.id` = '{job.id}'", output_format="list")
        tags = {"slipstream.id": job.id}
        config = leaves(msgspec.to_builtins(job.config), ".")
        mlflow.end_run()  # this thread may have failed before in the middle of it
        mlflow.start_run(same[0].info.run_id if same else None, run_name=job.config.run.name, tags=tags)
        kept = same[0].data.params if same else {}  # MLflow refuses other values than the first
        mlflow.log_params({key: str(value)[:500] for key, value in config if key not in kept})

    def write(self, points: Sequence[Point]) -> None:
        for point in points:  # a metric's primary key is all of it, so a database keeps a repeated point once
            values = {mlflow_name(name): value for name, value in point.values.items()}
            self._mlflow.log_metrics(values, point.step, timestamp=int(point.time_s * 1000))

    def close(self) -> None:
        self._mlflow.end_run()


def mlflow_name(name: str) -> str:
    """A metric's name as MLflow takes it; environments may give theirs any name."""
    parts = (re.sub(r"[^\w. :-]", "_", part) for part in name.split("/"))
    return "/".join(part if part.strip(".") else "_" for part in parts)[:250]


class Trackio:
    """Trackio, locally or as its environment variables say. Each write is a session, whose end flushes."""

    def __init__(self, job: FedRun, cursor: Cursor) -> None:
        self._job = job

    def write(self, points: Sequence[Point]) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        config = msgspec.to_builtins(self._job.config)
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        name = self._job.config.run.name
        for kind in ("", "-evaluation"):
            if of_kind := [point for point in points if bool(point.dataset) == bool(kind)]:
                run = trackio.init(project, f"{name}-{self._job.id}{kind}", group=name, config=config, **options)
                for point in of_kind:
                    if kind or point.step >= run._next_step:  # it has the others, and takes them twice
                        run.log(point.values, step=point.step)
                run.finish()

    def close(self) -> None: ...


BY_NAME = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
