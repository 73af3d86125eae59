"""TensorBoard, W&B, MLflow and Trackio as sinks (launch/sinks/feed.py). Each library is imported when it is used."""

import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from launch.sinks.points import Cursor, Job, Point, leaves

PROJECT = "slipstream"
WANDB_FLUSH_S = 0.1
WANDB_STEPS = 16  # numbers of W&B's own step per step of the run; those between are for evaluations


def flat_config(job: Job) -> dict[str, str | int | float]:
    """The config by dotted key; None as text."""
    found = leaves(msgspec.to_builtins(job.config), ".")
    return {key: value if isinstance(value, str | int | float) else str(value) for key, value in found}


class Tracker:
    """A sink that only takes points."""

    def tick(self) -> None:
        pass


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard; evaluations are a run of their own, because they come behind the steps."""

    def __init__(self, job: Job, cursor: Cursor) -> None:
        self._folder = job.run.path / "tensorboard"
        self._steps, self._evaluations = self._writer("", cursor.step + 1), self._writer("evaluation")
        self._steps.add_event(_hparams(flat_config(job)))

    def _writer(self, folder: str, void_from: int | None = None) -> Any:
        """A new event file. Readers drop what earlier files have from step `void_from` on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(self._folder / folder))
        if void_from is not None:
            writer.add_event(Event(session_log=SessionLog(status=SessionLog.START), step=void_from))
        return writer

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            if point.again:
                self.close()
                self._steps = self._writer("", point.step)
                self._evaluations = self._writer("evaluation", point.step + 1)
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            writer = self._evaluations if point.dataset else self._steps
            writer.add_event(Event(summary=Summary(value=values), step=point.step, wall_time=point.time_s))
        self._steps.flush()
        self._evaluations.flush()

    def close(self) -> None:
        self._steps.close()
        self._evaluations.close()


def _hparams(values: dict[str, str | int | float]) -> Any:
    """The event of TensorBoard's hparams plugin, whose own function needs TensorFlow."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME, SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    session = SessionStartInfo()
    for key, value in values.items():
        field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(session.hparams[key], field, value)
    content = HParamsPluginData(session_start_info=session, version=PLUGIN_DATA_VERSION).SerializeToString()
    data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content)
    value = Summary.Value(tag=SESSION_START_INFO_TAG, metadata=SummaryMetadata(plugin_data=data))
    return Event(summary=Summary(value=[value]))


class Wandb(Tracker):
    """Weights & Biases, as its environment variables say; WANDB_MODE=offline writes RUN/wandb."""

    def __init__(self, job: Job, cursor: Cursor) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        quiet = {"console": "off", "silent": True, "x_disable_stats": True}
        settings = wandb.Settings(**quiet, x_transaction_log_flush_interval=WANDB_FLUSH_S)
        named = {"project": project, "name": job.name, "id": job.id, "dir": str(job.run.path)}
        self._run = wandb.init(**named, resume="allow", config=msgspec.to_builtins(job.config), settings=settings)
        self._run.define_metric("*", step_metric="step")
        self._datasets: set[str] = set()

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if not point.dataset:
                number = point.step * WANDB_STEPS
                if number >= self._run.step:  # W&B's history takes no step twice
                    self._run.log({"step": point.step, **point.values}, step=number, commit=True)
                continue
            if point.dataset not in self._datasets:
                self._datasets.add(point.dataset)
                place = f"evaluation/{point.dataset}"
                self._run.define_metric(f"{place}/*", step_metric=f"{place}/policy_version")
            self._run.log(point.values)
        self._run.summary.get("step")  # W&B's own process answers when it has handled all of the above
        time.sleep(2 * WANDB_FLUSH_S)  # by then it has written its file, which survives a kill

    def close(self) -> None:
        self._run.finish()


class Mlflow(Tracker):
    """MLflow at MLFLOW_TRACKING_URI, else in RUN/mlflow.db."""

    def __init__(self, job: Job, cursor: Cursor) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        default = f"sqlite:///{job.run.path.resolve()}/mlflow.db"
        self._client = client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", default))
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else client.create_experiment(experiment)
        runs = client.search_runs([place], f"tags.`slipstream.id` = '{job.id}'", max_results=1)
        run = runs[0] if runs else client.create_run(place, tags={"slipstream.id": job.id}, run_name=job.name)
        self._id = run.info.run_id
        if not runs:
            params = [Param(key, str(value)[:500]) for key, value in flat_config(job).items()]
            for some in _chunks(params, 100):
                client.log_batch(self._id, params=some)

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        # A metric's primary key is all of it, so a database keeps a repeated point once.
        named = [(point, name, value) for point in points for name, value in point.values.items()]
        metrics = [Metric(name, value, int(point.time_s * 1000), point.step) for point, name, value in named]
        for some in _chunks(metrics, 1000):
            self._client.log_batch(self._id, metrics=some)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """Trackio, locally or as its environment variables say. Each write is a session, whose end flushes."""

    def __init__(self, job: Job, cursor: Cursor) -> None:
        self._job, self._highest = job, cursor.highest

    def write(self, points: Sequence[Point]) -> None:
        self._log([point for point in points if not point.dataset], f"{self._job.name}-{self._job.id}")
        self._log([point for point in points if point.dataset], f"{self._job.name}-{self._job.id}-evaluation")

    def _log(self, points: Sequence[Point], name: str) -> None:
        import trackio

        if not points:
            return
        project, config = os.environ.get("TRACKIO_PROJECT", PROJECT), flat_config(self._job)
        options = {"resume": "allow", "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        run = trackio.init(project, name, group=self._job.name, config=config, **options)
        for point in points:
            before_crash = self._highest < point.step < run._next_step  # it has them, and the cursor did not move
            if point.dataset or not before_crash:
                run.log(point.values, step=point.step)
        run.finish()
        self._highest = max([self._highest, *(point.step for point in points if not point.dataset)])

    def close(self) -> None:
        pass


def _chunks(values: list[Any], size: int) -> list[list[Any]]:
    return [values[at : at + size] for at in range(0, len(values), size)]
