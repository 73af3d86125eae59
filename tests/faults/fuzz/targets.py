"""Processes whose sockets are fuzzed: a broker, or the weight plane's control thread. Killed by the test.

Usage: python -m tests.faults.fuzz.targets broker RUN_DIR KEYS|- | weights RUN_DIR KEYS|-
"""

import logging
import sys
from pathlib import Path

import msgspec

from broker.main import run_broker
from broker.server import flood_guard
from common.config.schema import WeightsConfig
from common.process.run_dir import write_atomic
from tests.rigs.brokers import job

MAX_MESSAGE_BYTES = 1 << 20
flood_guard.UNEXPLAINED_BYTES = 48 << 20


def broker(run_dir: str, credentials: str | None) -> int:
    config = job(Path(run_dir), max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials)
    return run_broker(config, msgspec.json.encode(config))


def weights(run_dir: str, credentials: str | None) -> int:
    from common.weights.source.control import PublishControl

    control = PublishControl(WeightsConfig(), 0, credentials)
    write_atomic(Path(run_dir) / "weights.address", control.address.encode())
    control.run()
    return 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    role, run_dir, keys = sys.argv[1:]
    sys.exit({"broker": broker, "weights": weights}[role](run_dir, None if keys == "-" else keys))
