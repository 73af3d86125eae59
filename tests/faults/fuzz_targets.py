"""Processes whose sockets are fuzzed: a broker, or the weight plane's control thread. Killed by the test.

Usage: python fuzz_targets.py broker RUN_DIR KEYS|- | weights RUN_DIR KEYS|-
"""

import logging
import sys
from pathlib import Path

import msgspec

from broker.guard import flood_guard
from broker.main import run_broker
from common.config.schema import BrokerConfig, Config, LearnerConfig, ModelConfig, RunConfig, TasksConfig, WeightsConfig

MAX_MESSAGE_BYTES = 1 << 20
flood_guard.UNEXPLAINED_BYTES = 48 << 20


def broker(run_dir: str, credentials: str | None) -> int:
    config = Config(
        run=RunConfig(name="fuzzed", dir=run_dir, steps=1),
        model=ModelConfig(path="none"),
        tasks=TasksConfig(environment="none", dataset="none", max_attempts=50),
        learner=LearnerConfig(groups_per_step=2),
        broker=BrokerConfig(max_message_bytes=MAX_MESSAGE_BYTES, credentials=credentials),
    )
    return run_broker(config, msgspec.json.encode(config))


def weights(run_dir: str, credentials: str | None) -> int:
    from learner.publish.control import PublishControl

    control = PublishControl(WeightsConfig(), 0, 1 << 20, credentials)
    place = Path(run_dir) / "weights.address"
    place.with_suffix(".part").write_text(control.address)
    place.with_suffix(".part").rename(place)
    control.run()
    return 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    role, run_dir, keys = sys.argv[1:]
    sys.exit({"broker": broker, "weights": weights}[role](run_dir, None if keys == "-" else keys))
