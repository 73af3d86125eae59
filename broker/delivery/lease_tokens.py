"""Lease tokens: nobody can guess one, and making one costs no system call."""

import os

TOKEN_BYTES = 8
POOL_TOKENS = 512


class Tokens:
    """Calls give hexadecimal strings of TOKEN_BYTES from the system's random numbers, read for many at once."""

    def __init__(self) -> None:
        self._pool = ""
        self._next = 0

    def __call__(self) -> str:
        if self._next >= len(self._pool):
            self._pool, self._next = os.urandom(POOL_TOKENS * TOKEN_BYTES).hex(), 0
        start = self._next
        self._next = start + 2 * TOKEN_BYTES
        return self._pool[start : self._next]
