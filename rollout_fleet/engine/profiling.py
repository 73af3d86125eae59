"""vLLM's profiler while a node has the version of one of telemetry.profile_steps."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.config.observing import TelemetryConfig

if TYPE_CHECKING:
    from common.weights.receive.node_client import WeightClient
    from rollout_fleet.engine.engine import Engine

logger = logging.getLogger(__name__)

MOST_ENGINE_STEPS = 500  # a profile with more would take long to write
LOOK_S = 0.5


def profiler_config(folder: Path) -> dict[str, Any]:
    """vLLM's profiler_config of an engine that writes profiles into `folder`; nothing is recorded before it is told."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.absolute()),
        "torch_profiler_with_stack": False,  # many times the size
        "torch_profiler_with_memory": True,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "max_iterations": MOST_ENGINE_STEPS,
    }


async def record(engine: "Engine", feed: "WeightClient", telemetry: TelemetryConfig, node_id: str) -> None:
    """Profile each chosen version from its flip to the end of the next one. Failures are logged."""
    left = set(telemetry.profile_steps)
    try:
        while left:
            version = feed.state.version
            if version in left:
                left.remove(version)
                try:
                    await engine.profile(f"rollout-{re.sub('[^A-Za-z0-9._-]', '-', node_id)[:96]}-step-{version}")
                    while feed.state.version == version:
                        await feed.wait_change(LOOK_S)
                finally:
                    await engine.profile(None)
            else:
                await feed.wait_change(LOOK_S)
    except Exception:
        logger.warning("this node records no more profiles", exc_info=True)
