"""Where the view goes: redrawn in place on a terminal, a line every few seconds anywhere else."""

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.live import Live

from common.config.schema import Config
from launch.observe.job_view import plain_line, render_live
from launch.observe.metrics_tail import MetricsTail
from launch.observe.observation import Observation

PLAIN_EVERY_S = 3.0
NOTES_SHOWN = 4


@contextmanager
def open_display(config: Config, tail: MetricsTail, plain: bool) -> Iterator["Display"]:
    """The live view when stdout is a terminal, else lines."""
    with nullcontext() if plain or not sys.stdout.isatty() else Live(auto_refresh=False) as live:
        yield Display(config, tail, live)


class Display:
    """Redraws a rich view in place; without one, prints a line when something changed."""

    def __init__(self, config: Config, tail: MetricsTail, live: Live | None) -> None:
        self._config, self._tail, self._live = config, tail, live
        self._notes: deque[str] = deque(maxlen=NOTES_SHOWN)
        self._last = ""
        self.every_s = max(config.telemetry.refresh_s, 0.0 if live else PLAIN_EVERY_S)  # between two looks at the job

    def show(self, seen: Observation | None) -> None:
        """Show the newest observation."""
        if self._live is not None:
            self._live.update(render_live(self._config, seen, self._tail, self._notes), refresh=True)
        elif (line := plain_line(self._config, seen, self._tail)) != self._last:
            print(line, flush=True)
            self._last = line

    def note(self, text: str) -> None:
        """Tell a person something: under the view, or as a line."""
        self._notes.append(text)
        if self._live is None:
            print(text, flush=True)
