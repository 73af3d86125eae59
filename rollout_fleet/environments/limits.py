"""The limits that hold for a run: what the environment's class says, overridden by tasks.limits."""

from dataclasses import fields, replace

from common.config.schema import LimitsConfig
from rollout_fleet.environments.protocol import Limits


def limits_of(environment: object, overrides: LimitsConfig) -> Limits:
    """`environment.LIMITS` (or the defaults) with every key that tasks.limits sets."""
    own = getattr(environment, "LIMITS", Limits())
    said = {f.name: getattr(overrides, f.name) for f in fields(Limits)}
    return replace(own, **{name: value for name, value in said.items() if value is not None})
