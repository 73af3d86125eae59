"""Worker extension of the tests: what our own one does, and damage on request."""

from collections.abc import Callable
from typing import Any

from rollout_fleet.weights.worker_extension import WorkerExtension


class DamagingExtension(WorkerExtension):
    def damage_next_load(self, part: str) -> None:
        """After the next load_weights, one element of the first parameter named like `part` gets another value."""
        model: Any = self.weight_transfer_engine.model
        load = model.load_weights

        def damaged(weights: Any) -> Any:
            loaded = load(weights)
            parameter = next(p for name, p in model.named_parameters() if part in name)
            parameter.data.view(-1)[-1] += 1e-3
            model.load_weights = load
            return loaded

        model.load_weights = damaged

    def damage_next_bucket(self, number: int) -> None:
        """One bit of bucket `number` of the next publish arrives wrong, before anything looked at it."""
        receiver: Any = self.weight_transfer_engine.receiver
        factory, kept = receiver._group_factory, receiver._group
        state = {"bucket": 0}

        class Damaging:
            def __init__(self, group: Any) -> None:
                self.group = group

            def post(self, bucket: Any, timeout_s: float) -> Callable[[], None]:
                wait = self.group.post(bucket, timeout_s)

                def arrived() -> None:
                    wait()
                    if state["bucket"] == number:
                        bucket[len(bucket) // 2] ^= 1
                    state["bucket"] += 1

                return arrived

            def __getattr__(self, name: str) -> Any:
                return getattr(self.group, name)

        def once(epoch: Any) -> Damaging:
            receiver._group_factory = factory
            return Damaging(factory(epoch))

        receiver._group_factory = once  # whether the next publish uses the group that there is or forms one
        if kept is not None:
            receiver._group = Damaging(kept)
