"""One call in a process of its own, with limits and without network, which is gone afterwards.

process_backend.py says which faults that contains.
"""

import asyncio
import atexit
import contextlib
import functools
import math
from typing import Any

from rollout_fleet.environments.isolation import ipc_frames
from rollout_fleet.environments.isolation.backend import EnvironmentDied, ObservationTooLarge
from rollout_fleet.environments.isolation.process_backend import ProcessHost
from rollout_fleet.environments.protocol import Limits

FILE_BYTES = 1 << 20


class Killed(Exception):
    """The call's process was ended; the message says why."""


@functools.cache
def _host(modules: tuple[str, ...]) -> ProcessHost:
    host = ProcessHost(modules)
    atexit.register(host.close)
    return host


async def call_apart(
    path: str,
    keywords: dict[str, Any],
    *,
    seconds: float,
    memory_mib: int,
    answer_chars: int = 0,
    file_bytes: int = FILE_BYTES,
    preload: tuple[str, ...] = (),
) -> Any:
    """The answer of 'module:function' to `keywords`; both travel as JSON.

    `seconds` limits wall time and, rounded up, CPU time; `memory_mib` limits address space. The function's module and
    those of `preload` are imported once for all calls. Raises Killed, and EnvironmentRaised for what the call raises.
    """
    limits = Limits(cpu_s=max(1, math.ceil(seconds)), memory_mib=memory_mib)
    host = _host((path.partition(":")[0], *preload))
    with contextlib.closing(await host.open(limits, seconds + 5.0, network=False, file_bytes=file_bytes)) as channel:
        try:
            async with asyncio.timeout(seconds):
                limit = answer_chars * ipc_frames.CHAR_BYTES + ipc_frames.SMALL_BYTES
                return await channel.ask(limit, do="call", path=path, keywords=keywords)
        except TimeoutError:
            raise Killed(f"it took longer than {seconds:g} s") from None
        except (EnvironmentDied, ObservationTooLarge) as error:
            raise Killed(str(error)) from error
