"""A taskset of the verifiers library whose tasks bring a tool; runs under an interpreter that has it."""

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["SumTaskset"]


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b + 1000)


class Sum(vf.Task):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == "1003")

    @vf.metric
    async def called(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SumTaskset(vf.Taskset[Sum]):
    def load(self):  # type: ignore[no-untyped-def]
        yield Sum(vf.TaskData(prompt="1 + 2?"), self.config.task)


if __name__ == "__main__":
    Adder.run()
