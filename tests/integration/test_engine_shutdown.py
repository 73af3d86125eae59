"""The end of an engine that still generates: requests hear of it, and nobody takes it for a death."""

import asyncio
from pathlib import Path

from common.errors import SlipstreamError
from rollout_fleet.engine.engine import Engine
from tests.integration.engine_rig import job, make_model
from tests.waiting import LIMIT_S


def test_a_shutdown_ends_requests_with_its_reason_and_is_not_read_as_the_death_of_the_engine(tmp_path: Path) -> None:
    make_model(1).save_pretrained(tmp_path / "model")
    listening: list[bool] = []

    async def once() -> list[object]:
        engine = Engine(job(tmp_path), weights="folder", stop_token_ids=[])
        await engine.start()
        requests = [asyncio.create_task(engine.generate([5, 6, 7], 500)) for _ in range(8)]
        while not engine.counters.running:
            await asyncio.sleep(0.01)
        llm = engine._llm
        end = llm.shutdown

        def watched(timeout: float) -> None:
            listening.append(not llm.output_handler.done())
            end(timeout=timeout)

        llm.shutdown = watched
        await engine.shutdown()
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*requests, return_exceptions=True)

    outcomes = asyncio.run(once())
    assert listening == [False], "it would hear of the end of the process and log that the engine died"
    assert all(isinstance(outcome, SlipstreamError) and "shut down" in str(outcome) for outcome in outcomes), outcomes
