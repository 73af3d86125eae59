"""slipstream set RUN|ADDRESS tasks.sources.NAME.weight=X: other weights of sources while the job runs.

The broker keeps the request durably before the command returns. The learner carries it out with the next task that it
offers, also after a crash of either; docs/mixtures.md.
"""

import argparse
import re
import secrets
from collections.abc import Sequence

import msgspec
import yaml

from broker.contract import BrokerStatus, WeightRequest
from common.config.loading import OVERRIDE, describe_type, load_yaml
from common.config.schema import BaseConfig
from common.config.types import NonNegative
from common.errors import ConfigError, meant
from launch.observe.observation import ask
from launch.resolve_target import find_target, handed_out

KEY = re.compile(r"tasks\.sources\.([^.]+)\.weight")


def command(args: argparse.Namespace) -> int:
    job = find_target(args)
    status = ask(job, lambda client: client.status())
    weights = asked(args.overrides, handed_out(status.run.config, status.address), status)
    request = WeightRequest(secrets.token_hex(8), weights)
    serial = ask(job, lambda client: client.set_weights(request), role="learner")
    shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
    print(f"recorded: {shown}. The next task that the learner offers follows it; tasks before {serial} stay")
    return 0


def asked(words: Sequence[str], config: BaseConfig, status: BrokerStatus) -> dict[str, float]:
    """The new weights by source. Raises ConfigError for a key that cannot change, and for weights that cannot be."""
    sources = config.rl.tasks.sources if config.rl is not None else {}
    keys = [f"tasks.sources.{name}.weight" for name in sources]
    weights = dict[str, float]()
    for word in words or [""]:
        key, _, text = word.partition("=")
        found = KEY.fullmatch(key)
        if found is None or found[1] not in sources:
            hint = meant(key, keys, f"keys that can change: {', '.join(keys) or 'none'}")
            expected = "a key that can change while the job runs"
            raise ConfigError(OVERRIDE, key or "key=value", expected, repr(word) if word else "nothing", hint)
        try:
            value = load_yaml(text)
            weights[found[1]] = msgspec.convert(value, NonNegative)
        except (yaml.YAMLError, msgspec.ValidationError):
            raise ConfigError(OVERRIDE, key, describe_type(NonNegative), repr(text)) from None
    known = {name: source.weight for name, source in sources.items()}
    known |= status.weights.weights if status.weights is not None else {}
    for request in status.weight_requests:
        known |= request.weights
    if not any((known | weights).values()):
        raise ConfigError(OVERRIDE, keys[0], "a weight above 0 of at least one source", "0 of all")
    return weights
