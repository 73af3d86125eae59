"""Worker extension of the tests: what our own one does, and damage on request."""

from typing import Any

from rollout_fleet.transfer import WorkerExtension


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
