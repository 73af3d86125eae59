"""The limits of a run's episodes: those of the environment's class, overridden by tasks.limits."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from rollout_fleet.environments.protocol import Limits

if TYPE_CHECKING:
    from common.config.schema import LimitsConfig


def own_limits(environment: object) -> Limits:
    """The `LIMITS` of the class, or the defaults."""
    return getattr(environment, "LIMITS", Limits())


def limits_of(own: Limits, overrides: "LimitsConfig") -> Limits:
    """`own` with every key that tasks.limits sets. Another interpreter needs a process of its own."""
    said = {f.name: getattr(overrides, f.name) for f in fields(Limits)}
    found = replace(own, **{name: value for name, value in said.items() if value is not None})
    return replace(found, process=found.process or bool(found.python))
