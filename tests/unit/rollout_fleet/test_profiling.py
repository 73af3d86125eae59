"""When a node tells the engine to profile. The engine here takes notes; test_node_vllm.py has the real one."""

import asyncio
import logging
from pathlib import Path

import pytest

from common.config.observing import TelemetryConfig
from common.weights.receive.contract import WeightsState
from rollout_fleet.engine.engine import profiler_config, record_profiles

TELEMETRY = TelemetryConfig(profile_steps=[2, 4], profile_nodes=["n/0"])


class Feed:
    """The node has one version after the other, each for one look, and waits when there is no more."""

    def __init__(self, *versions: int) -> None:
        self._states = [WeightsState(version=version) for version in versions]
        self.state = WeightsState()
        self.ended = asyncio.Event()

    async def wait_change(self, timeout_s: float) -> WeightsState:
        assert timeout_s > 0
        if not self._states:
            self.ended.set()
            await asyncio.Event().wait()
        self.state = self._states.pop(0)
        return self.state


class Engine:
    def __init__(self, fails: bool = False) -> None:
        self.calls, self._fails = list[str](), fails

    async def profile(self, name: str | None) -> None:
        self.calls.append(name or "stop")
        if name and self._fails:
            raise RuntimeError("no profiler here")


def calls(engine: Engine, *versions: int) -> list[str]:
    """The engine's orders while the node had these versions and then was told to end."""

    async def play() -> None:
        feed = Feed(*versions)
        task = asyncio.create_task(record_profiles(engine, feed, TELEMETRY, "n/0"))  # type: ignore[arg-type]
        ended = asyncio.create_task(feed.ended.wait())
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)

    asyncio.run(play())
    return engine.calls


def test_a_profile_lasts_from_a_chosen_version_to_the_next_one() -> None:
    assert calls(Engine(), 0, 1, 2, 2, 3, 4, 5) == ["rollout-n-0-step-2", "stop", "rollout-n-0-step-4", "stop"]


def test_the_page_says_how_long_a_profile_can_be() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "trace.md"
    assert f"after {profiler_config(Path('profiles'))['max_iterations']} engine steps" in page.read_text()


def test_a_version_that_the_node_never_had_is_not_recorded() -> None:
    assert calls(Engine(), 1, 3, 5) == []


def test_a_node_that_leaves_writes_the_profile_first() -> None:
    assert calls(Engine(), 3, 4) == ["rollout-n-0-step-4", "stop"]


def test_a_profiler_that_fails_is_logged_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rollout_fleet.engine.engine"):
        assert calls(Engine(fails=True), 2, 3, 4) == ["rollout-n-0-step-2", "stop"]
    assert len(caplog.records) == 1
