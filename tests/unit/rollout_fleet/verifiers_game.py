"""A taskset of the verifiers library with an environment of several turns; runs under an interpreter that has it."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["GuessEnv", "GuessTaskset"]


class Row(vf.TaskData):
    answer: str = ""


class Guess(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class GuessConfig(vf.TasksetConfig):
    bonus: float = 0.0


class GuessTaskset(vf.Taskset[Guess, GuessConfig]):
    def load(self):  # type: ignore[no-untyped-def]
        yield Guess(Row(prompt=None, answer="7"), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    """Asks until the number is right."""

    async def run(self, task: Guess, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            said = await talk.turn("a number?")
            while not said.terminated and said.last_reply.strip() != task.data.answer:
                said = await talk.turn("wrong, again")
        talk.trace.record_reward("bonus", self.config.taskset.bonus)
