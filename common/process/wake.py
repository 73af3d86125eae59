"""Lets one thread end the poll of another."""

import contextlib
import os
import weakref


class Wake:
    """Readable for a poller from `send` until `drain`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)  # not earlier: a late `send` must not hit another file

    def fileno(self) -> int:
        return self._descriptor

    def send(self) -> None:
        """Never blocks; callable from any thread or signal handler."""
        os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there was no `send`
            os.eventfd_read(self._descriptor)
