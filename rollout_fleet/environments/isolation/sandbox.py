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
from rollout_fleet.environments.isolation.backend import EnvironmentDied, EnvironmentLost, ObservationTooLarge
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
    cpu_s: float | None = None,
    answer_chars: int = 0,
    file_bytes: int = FILE_BYTES,
    preload: tuple[str, ...] = (),
) -> Any:
    """The answer of 'module:function' to `keywords`; both travel as JSON.

    `seconds` limits wall time; `cpu_s`, rounded up, limits CPU time, and is as long unless it is given. `memory_mib`
    limits address space. The function's module and those of `preload` are imported once for all calls. Raises Killed,
    EnvironmentRaised for what the call raises, and EnvironmentLost where the machine is to blame.
    """
    limits = Limits(cpu_s=max(1, math.ceil(seconds if cpu_s is None else cpu_s)), memory_mib=memory_mib)
    host = _host((path.partition(":")[0], *preload))
    with contextlib.closing(await host.open(limits, seconds + 5.0, network=False, file_bytes=file_bytes)) as channel:
        try:
            async with asyncio.timeout(seconds):
                limit = answer_chars * ipc_frames.CHAR_BYTES + ipc_frames.SMALL_BYTES
                return await channel.ask(limit, do="call", path=path, keywords=keywords)
        except EnvironmentLost:
            raise
        except TimeoutError:
            raise Killed(f"it took longer than {seconds:g} s") from None
        except (EnvironmentDied, ObservationTooLarge) as error:
            raise Killed(str(error)) from error
