"""Worker extension of an engine that schedules as on CUDA. Only its process imports this: it replaces torch's streams.

With asynchronous scheduling vLLM's model runner copies what it samples on a stream of its own, and waits for an event.
A CPU has done everything by the time that it is asked.
"""

import contextlib
from typing import Any

import torch

from tests.rigs.engine_extension import DamagingExtension


class CudaScheduleExtension(DamagingExtension):
    """Damages as the other one does."""


class Done:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


for name in ("Event", "Stream", "current_stream"):
    setattr(torch.cuda, name, Done)
torch.cuda.stream = contextlib.nullcontext  # type: ignore[assignment]
