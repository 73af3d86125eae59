"""slipstream set: which weights it asks for, and which it refuses with exit code 2."""

from pathlib import Path

import msgspec
import pytest

from broker.contract import BrokerStatus, WeightChange, WeightRequest
from common.config.loading import build_config
from common.config.schema import Config
from common.errors import ConfigError
from launch.cli import main
from launch.up.change import asked
from tests.rigs.brokers import MemoryBroker, run_info, serving

SOURCES = {name: {"environment": "addition", "dataset": "x"} for name in ("math", "code")}
JOB = {"run": {"name": "t", "dir": "x", "steps": 2}, "model": {"path": "x"}, "tasks": {"sources": SOURCES}}
MATH, CODE = (f"tasks.sources.{name}.weight" for name in ("math", "code"))


def config() -> Config:
    return build_config(msgspec.to_builtins(JOB), "job.yaml")


def status(**changed: object) -> BrokerStatus:
    return msgspec.structs.replace(MemoryBroker(run_info()).learner().status(), **changed)


def test_several_weights_are_asked_for_at_once() -> None:
    assert asked([f"{MATH}=0.3", f"{CODE}=2"], config(), status()) == {"math": 0.3, "code": 2}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([], "key=value"),
        (["run.steps=3"], "run.steps"),
        (["tasks.sources.math.max_tokens=3"], "tasks.sources.math.max_tokens"),
        (["tasks.sources.maths.weight=1"], "tasks.sources.maths.weight"),
        ([f"{MATH}=-1"], MATH),
        ([f"{MATH}=nan"], MATH),
        ([f"{MATH}=.inf"], MATH),
        ([f"{MATH}=true"], MATH),
        ([f"{MATH}=["], MATH),
        ([f"{MATH}"], MATH),
        ([f"{MATH}=0", f"{CODE}=0"], MATH),
    ],
)
def test_keys_that_cannot_change_and_weights_that_cannot_be_are_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(words, config(), status())
    assert caught.value.key == key


def test_the_last_weight_above_0_stays_whatever_changed_before_and_is_asked_for() -> None:
    changed = status(weights=WeightChange(4, {"math": 1.0, "code": 0.0}))
    with pytest.raises(ConfigError):
        asked([f"{MATH}=0"], config(), changed)
    later = msgspec.structs.replace(changed, weight_requests=[WeightRequest("r", {"code": 1.0})])
    assert asked([f"{MATH}=0"], config(), later) == {"math": 0}


def test_a_job_without_sources_has_no_key_that_can_change() -> None:
    alone = build_config(JOB | {"tasks": SOURCES["math"]}, "job.yaml")
    with pytest.raises(ConfigError):
        asked([f"{MATH}=1"], alone, status())


def test_the_command_reaches_the_broker_and_refuses_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broker = MemoryBroker(run_info(config=msgspec.json.encode(config())))
    with serving(state=broker.state) as server:
        assert main(["set", server.address, f"{MATH}=0.25"]) == 0
        assert [request.weights for request in broker.learner().status().weight_requests] == [{"math": 0.25}]
        assert main(["set", server.address, f"{MATH}=-1"]) == 2
        assert MATH in capsys.readouterr().err
        assert len(broker.learner().status().weight_requests) == 1
