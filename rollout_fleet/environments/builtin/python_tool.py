"""Word problems with a Python tool: the policy may run code, in a sandbox, before it answers."""

from typing import Any

from rollout_fleet.environments.builtin.gsm8k import final_number, read_row
from rollout_fleet.environments.isolation.sandbox import run_python
from rollout_fleet.environments.protocol import Limits
from rollout_fleet.environments.tools import Tool, ToolEnvironment

PROMPT = "{question}\nYou may run Python with the tool `python`. Give the final number after ####."
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


class PythonTool(ToolEnvironment):
    """Multi turn. Problem: a row of GSM8K's form, {"question": text, "answer": "... #### NUMBER"}.

    Options:
        prompt: template of the question, with {question}.
        code_s, memory_mib, output_chars: of one run of the tool.
    """

    LIMITS = Limits(step_s=120.0)

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        prompt: str = PROMPT,
        code_s: float = 5.0,
        memory_mib: int = 512,
        output_chars: int = 4000,
    ) -> None:
        super().__init__()
        question, self.gold = read_row(problem)
        self.messages = (("user", prompt.replace("{question}", question)),)

        async def python(code: str) -> str:
            return await run_python(code, code_s, memory_mib, output_chars) or "(no output)"

        self.tools = (Tool("python", "Runs Python code and returns what it prints.", PARAMETERS, python),)

    async def judge(self, answer: str) -> float:
        return float(final_number(answer) == self.gold)
