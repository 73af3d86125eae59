"""torch.profiler around the optimizer steps of telemetry.profile_steps, on the ranks that the config chooses."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from common.config.observing import TelemetryConfig

logger = logging.getLogger(__name__)

MEMORY_ENTRIES = 100_000  # allocations in a snapshot's history; each takes some KB


class StepProfiler:
    """Writes FOLDER/learner-RANK-step-N.json.gz, a Chrome trace, and with CUDA learner-RANK-step-N-memory.pickle."""

    def __init__(self, telemetry: TelemetryConfig, rank: int, folder: Path) -> None:
        self._steps = set(telemetry.profile_steps if rank in telemetry.profile_ranks else ())
        self._rank = rank
        self._folder = folder

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """The context in which this step belongs. After a failure, which is logged, no step is recorded."""
        profiler = self._tried(self._start) if step in self._steps else None
        with record_function(f"step {step}"):
            yield
        if profiler is not None:
            self._tried(lambda: _write(profiler, f"{self._folder}/learner-{self._rank}-step-{step}"))

    def _tried(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception:
            self._steps.clear()
            logger.warning("the profiler failed; this rank records no more steps", exc_info=True)

    def _start(self) -> profile:
        self._folder.mkdir(parents=True, exist_ok=True)
        if torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        profiler = profile(record_shapes=True, profile_memory=True)  # CUDA is included where it exists
        profiler.start()
        return profiler


def _write(profiler: profile, name: str) -> None:
    cuda = torch.cuda.is_available()
    try:
        profiler.stop()
        if cuda:
            torch.cuda.memory._dump_snapshot(f"{name}-memory.pickle")
    finally:
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
    profiler.export_chrome_trace(f"{name}.json.gz")
