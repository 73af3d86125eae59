"""Word problems with a Python tool: the policy may run code before it answers.

Each call runs in a process of its own, with limits and without network, which is gone afterwards. process_backend.py
says which faults that contains.
"""

import ast
import contextlib
import os
import sys
import tempfile
import traceback
from typing import Any

from rollout_fleet.environments.builtin.math_problems import final_number, read_row
from rollout_fleet.environments.isolation.backend import EnvironmentRaised
from rollout_fleet.environments.isolation.sandbox import Killed, call_apart
from rollout_fleet.environments.protocol import Limits
from rollout_fleet.environments.tools import Tool, ToolEnvironment

PROMPT = "{question}\nYou may run Python with the tool `python`. Give the final number after ####."
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
NAME = "<code>"  # the file that tracebacks name
LEAST_FILE_BYTES = 1 << 20
FULL_OR_CLOSED = contextlib.suppress(OSError, ValueError)  # the output's file is full, or the code closed the stream


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


async def run_python(code: str, seconds: float = 5.0, memory_mib: int = 512, output_chars: int = 4000) -> str:
    """Runs `code`; returns its stdout and stderr, the value of a last expression, and the traceback if it raises.

    `seconds` limits wall time and, rounded up, CPU time; `memory_mib` limits address space. Output beyond
    `output_chars` is cut and says so; far more makes the write fail. It is `killed: ...` when the process was ended.
    """
    try:
        return await call_apart(
            f"{__name__}:execute",
            {"code": code, "chars": output_chars},
            seconds=seconds,
            memory_mib=memory_mib,
            answer_chars=output_chars,
            file_bytes=max(LEAST_FILE_BYTES, 4 * output_chars),
        )
    except (Killed, EnvironmentRaised) as error:
        return f"killed: {error}"


def execute(code: str, chars: int) -> str:
    """In the process: run `code`, with both streams into a file, and return the file's beginning."""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _run(code)
        for stream in (sys.stdout, sys.stderr):
            with FULL_OR_CLOSED:
                stream.flush()
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        text = file.read(4 * chars).decode("utf-8", "replace")
    return text if len(text) <= chars and size <= 4 * chars else f"{text[:chars]}\n... (of {size} bytes)"


def _run(code: str) -> None:
    world = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), world)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), NAME, "eval"), world))  # noqa: S307
    except SystemExit:
        return
    except BaseException as error:  # whatever it raises is its output
        frames_of_code = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
        said = traceback.format_list(frames_of_code) + traceback.format_exception_only(error)
        with FULL_OR_CLOSED:
            sys.stderr.write("".join(said))
