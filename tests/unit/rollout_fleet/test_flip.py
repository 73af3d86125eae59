"""What a flip that recomputes the cache leaves behind in vLLM's scheduler."""

from types import SimpleNamespace

from rollout_fleet.vllm_patches.flip import drop_cache


class EngineInSmall:
    """Requests as vLLM's scheduler keeps them, and what its EngineCore does to them when the caches are dropped."""

    def __init__(self, preemptions: list[int]) -> None:
        running = [SimpleNamespace(num_preemptions=n, num_computed_tokens=9) for n in preemptions]
        self.scheduler = SimpleNamespace(running=running, waiting=[])

    def _reset_caches(self, reset_running_requests: bool) -> None:
        while reset_running_requests and self.scheduler.running:
            request = self.scheduler.running.pop()
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            self.scheduler.waiting.insert(0, request)


def test_it_is_a_preemption_of_nobody_also_not_of_those_who_were_preempted_before() -> None:
    engine = EngineInSmall([0, 1, 3])
    drop_cache(engine)
    assert [request.num_preemptions for request in engine.scheduler.waiting] == [0, 0, 0]
