"""The limits of an environment, and the record of its turns."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from common.config.schema import Config
from common.config.tasks import LimitsConfig, TasksConfig
from common.errors import ConfigError
from common.process.run_dir import RunDir
from common.rollouts import Sample
from launch.checks.review import review
from launch.resolve_target import checked
from rollout_fleet.environments.description import check_environment, check_sources, limit_problems
from rollout_fleet.environments.protocol import Action, Chat, Limits, StepResult
from tests.rigs.configs import job_of
from tests.rigs.refusals import refused
from tests.rigs.waiting import LIMIT_S
from tests.unit.rollout_fleet.fleet_fakes import EOS, Base, ScriptedSampler, in_turn, make_driver, say, text_of


def play(environment: type, limits: Limits | None = None, turns: int = 3, **more: Any) -> Sample:
    answers = in_turn(*(say("ab", version=i) for i in range(turns)))
    return asyncio.run(make_driver(ScriptedSampler(answers), environment, limits=limits, **more).run({}, 7))


@pytest.mark.parametrize(
    ("where", "limits", "reason", "why", "sampled"),
    [
        ("reset", Limits(reset_s=0.1), "environment_timeout", "reset took longer than 0.1 s", ""),
        ("step", Limits(step_s=0.1), "environment_timeout", "step took longer than 0.1 s", "ab" + chr(EOS)),
        ("step", None, "timeout", "within 0.1 s", "ab" + chr(EOS)),
    ],
    ids=["reset", "step", "episode"],
)
def test_what_takes_too_long_fails_the_sample_with_its_own_reason_and_keeps_what_was_sampled(
    where: str, limits: Limits | None, reason: str, why: str, sampled: str
) -> None:
    async def slow(self: Any, *_: Any) -> Any:
        await asyncio.sleep(60)

    started = time.monotonic()
    sample = play(type("Slow", (Base,), {where: slow}), limits, timeout_s=LIMIT_S if limits else 0.1)
    assert time.monotonic() - started < 50
    assert (sample.stop_reason, text_of(sample, 1)) == (reason, sampled) and why in str(sample.error)


@pytest.mark.parametrize(
    "said", ["x" * 101, [1] * 101, Chat((("user", "x" * 60), ("user", "x" * 41)))], ids=["text", "tokens", "chat"]
)
@pytest.mark.parametrize("first", [True, False], ids=["reset", "step"])
def test_an_observation_beyond_its_limit_fails_the_sample_as_a_flood(said: Any, first: bool) -> None:
    class Floods(Base):
        async def reset(self) -> Any:
            return said if first else "go"

        async def step(self, action: Action) -> StepResult:
            return StepResult(said, done=False)

    sample = play(Floods, Limits(observation_chars=100))
    assert sample.stop_reason == "environment_flood" and "100" in str(sample.error)


def test_a_turn_that_the_environment_does_not_want_trained_is_out_of_the_loss_and_keeps_its_place() -> None:
    class Picky(Base):
        turn = 0

        async def step(self, action: Action) -> StepResult:
            self.turn += 1
            return StepResult("-", reward=float(self.turn), done=self.turn == 3, trained=self.turn != 2)

    sample = play(Picky)
    a, b = ord("a"), ord("b")
    assert sample.tokens.numpy().tolist() == [ord("g"), ord("o"), a, b, EOS, ord("-"), a, b, EOS, ord("-"), a, b, EOS]
    assert sample.loss_mask.numpy().tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1]
    assert sample.behavior_logprobs.numpy()[6:9].tolist() == [0.0, 0.0, 0.0]
    assert sample.turn_rewards == [1.0, 2.0, 3.0]
    assert sample.token_versions()[[2, 10]].tolist() == [0, 2]


async def test_no_more_episodes_of_a_class_run_than_it_allows_and_waiting_does_not_count_against_their_time() -> None:
    sampler = ScriptedSampler(lambda _: say("x"), delay_s=0.2)
    driver = make_driver(sampler, Base, limits=Limits(max_concurrent=2), timeout_s=2.0)
    samples = await asyncio.gather(*(driver.run({}, n) for n in range(22)))
    assert [s.stop_reason for s in samples] == ["stop"] * 22 and sampler.most_at_once == 2


@pytest.mark.parametrize("ending", ["done", "raised", "slow"])
def test_an_environment_is_closed_once_however_its_episode_ends(ending: str) -> None:
    closed: list[str] = []

    class Closes(Base):
        async def step(self, action: Action) -> StepResult:
            if ending == "raised":
                raise RuntimeError("no")
            if ending == "slow":
                await asyncio.sleep(60)
            return StepResult(reward=1.0)

        async def close(self) -> None:
            closed.append(ending)
            raise RuntimeError("closing fails, and the episode ignores it")

    play(Closes, Limits(step_s=0.1))
    assert closed == [ending]


class Careful(Base):
    LIMITS = Limits(step_s=3.0, process=True, cpu_s=5)


def test_the_config_overrides_single_limits_of_the_class() -> None:
    def limits(name: str, **overrides: Any) -> Limits:
        tasks = TasksConfig(environment=f"{__name__}:{name}", dataset="-", limits=LimitsConfig(**overrides))
        return check_environment(tasks).limits

    assert limits("Careful") == Careful.LIMITS
    assert limits("Careful", process=False, max_concurrent=4) == Limits(step_s=3.0, cpu_s=5, max_concurrent=4)
    assert limits("Base") == Limits()


@pytest.mark.parametrize("limit", [{"cpu_s": 9}, {"memory_mib": 64}])
def test_a_limit_of_processes_is_refused_by_a_launch_for_an_environment_without_one(
    limit: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = f"tasks.limits.{next(iter(limit))}"

    def job(name: str, **process: bool) -> Config:
        tasks = {"environment": f"{__name__}:{name}", "limits": limit | process}
        return job_of(tmp_path, tasks=tasks)

    def reviewed(config: Config) -> tuple[list[str], list[str]]:
        found = review(config, "job.yaml")
        return [wrong.key for wrong in found.refused], [each.code for each in found.remarks if each.level == "warning"]

    unused = [job("Base"), job("Careful", process=False)]
    for config in (job("Careful"), job("Base", process=True)):
        assert check_environment(config.tasks).limits.process
        assert reviewed(config) == ([], []) == (list(limit_problems(config, check_sources(config))), [])
    for config in unused:
        with refused(ConfigError, key, "limits.process"):
            checked(config, "job.yaml")
        assert reviewed(config) == ([key], []) and not capsys.readouterr().err
        checked(config, "job.yaml", reader="node")
        assert capsys.readouterr().err.startswith(f"warning: {key}: expected limits.process: true")
    run = RunDir.of(unused[0])
    run.path.mkdir()
    run.metrics.touch()
    for config in unused:
        checked(config, "job.yaml")
        assert capsys.readouterr().err.startswith(f"warning: {key}: expected limits.process: true")
        assert reviewed(config) == ([], [key])
