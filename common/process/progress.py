"""A bar with the time left for long work that knows its total: on a terminal, else a line every ten seconds."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 10.0
LOOK_EVERY_S = 0.5
MIB = 1 << 20
T = TypeVar("T")
Show = Callable[[int], None]  # called with how many units are complete


@contextmanager
def bar(
    name: str, total: int, unit: str, quiet: bool = False, out: TextIO | None = None, before: int = 0
) -> Generator[Show]:
    """Show progress on `out` (stderr), so that stdout keeps the result; nothing when `quiet`, as for JSON.

    `before`: units that were complete already, as of work that continues.
    """
    to: TextIO = out or sys.stderr
    if quiet:
        yield lambda done: None
    elif to.isatty():
        shape = [BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn()]
        own = to is sys.stderr  # then what is printed meanwhile goes above the bar
        console, both = Console(file=to), own and sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), *shape)
        with Progress(*columns, console=console, transient=True, redirect_stdout=both, redirect_stderr=own) as shown:
            task = shown.add_task(name, total=total, completed=before)
            with _logging_to(sys.stderr if own else to, to):
                yield lambda done: shown.update(task, completed=done)
    else:
        yield _lines(name, total, unit, to, before)


def counted(things: Iterable[T], total: int, name: str, unit: str) -> Iterator[T]:
    """`things`, about `total` of them, with a bar. Each counts when the next one is asked for."""
    with bar(name, total, unit) as show:
        for done, thing in enumerate(things, start=1):
            yield thing
            show(min(done, total))


@contextmanager
def growing(folder: Path, total_bytes: int, name: str) -> Generator[None]:
    """A bar of the MiB in `folder`, while the block writes about `total_bytes` there. The folder may come later."""
    total = max(1, total_bytes // MIB)
    ended = threading.Event()
    with bar(name, total, "MiB written") as show:

        def look() -> None:
            while not ended.wait(LOOK_EVERY_S):
                with suppress(OSError):  # the folder is renamed when it is whole
                    written = sum(file.stat().st_size for file in folder.iterdir())
                    show(min(total, written // MIB))

        watching = threading.Thread(target=look, name="progress", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()


def _lines(name: str, total: int, unit: str, out: TextIO, before: int) -> Show:
    """'export: 12 of 40 tensors, 30%, 25 s left', every LINE_EVERY_S seconds at most."""
    began_s = said_s = time.monotonic()

    def show(done: int) -> None:
        nonlocal said_s
        if done > before and (now_s := time.monotonic()) - said_s >= LINE_EVERY_S:
            said_s = now_s
            left_s = (now_s - began_s) * (total - done) / (done - before)
            print(f"{name}: {done} of {total} {unit}, {done / total:.0%}, {left_s:,.0f} s left", file=out, flush=True)

    return show


@contextmanager
def _logging_to(stream: TextIO, before: TextIO) -> Generator[None]:
    """Log records that went to `before` go to `stream`."""
    found = [each for each in logging.getLogger().handlers if getattr(each, "stream", None) is before]
    handlers = cast("list[logging.StreamHandler[TextIO]]", found)
    for handler in handlers:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(before)
