"""Worker extension of an engine that schedules as on CUDA. Only its process imports this: it replaces torch's streams.

With asynchronous scheduling vLLM's model runner copies what it samples on a stream of its own, and waits for an event.
A CPU has done everything by the time that it is asked.
"""

import contextlib
import os
from typing import Any

import torch
from vllm.v1.engine.core import EngineCore

from tests.integration.engine_rig_extension import DamagingExtension


class CudaScheduleExtension(DamagingExtension):
    """What the other one does."""


class Done:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


def told(engine: Any, *names: str) -> tuple[str, int, list[str | None]]:
    """Name of the scheduler, batches in flight between two steps, and what this process has under these variables."""
    return type(engine.scheduler).__name__, len(engine.batch_queue), [os.environ.get(name) for name in names]


for name in ("Event", "Stream", "current_stream"):
    setattr(torch.cuda, name, Done)
torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
EngineCore.slipstream_told = told  # type: ignore[attr-defined]
