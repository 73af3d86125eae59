"""Lets one thread end the poll of another."""

import contextlib
import os
import weakref


class Wake:
    """Readable for a poller from `send` until `drain`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        closing = weakref.finalize(self, os.close, self._descriptor)  # earlier a late `send` could hit another file
        closing.atexit = False  # threads still use it then

    def fileno(self) -> int:
        return self._descriptor

    def send(self) -> None:
        """Never blocks; callable from any thread or signal handler."""
        os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there was no `send`
            os.eventfd_read(self._descriptor)
