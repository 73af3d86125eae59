"""Lease tokens that cannot be guessed and that rarely need a system call."""

import os

TOKEN_BYTES = 8
POOL_TOKENS = 512


class Tokens:
    """Each call returns TOKEN_BYTES random bytes in hexadecimal. One system call serves POOL_TOKENS tokens."""

    def __init__(self) -> None:
        self._pool = ""
        self._next = 0

    def __call__(self) -> str:
        if self._next >= len(self._pool):
            self._pool, self._next = os.urandom(POOL_TOKENS * TOKEN_BYTES).hex(), 0
        start = self._next
        self._next = start + 2 * TOKEN_BYTES
        return self._pool[start : self._next]
