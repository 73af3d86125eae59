"""An environment of the verifiers library, as people write them; runs under an interpreter that has it."""

from typing import Any


def load_environment(bonus: float = 0.0) -> Any:
    import verifiers as vf
    from datasets import Dataset

    def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer) + bonus

    class Guess(vf.MultiTurnEnv):
        @vf.stop
        async def found(self, state: Any) -> bool:
            said = [m for m in state["trajectory"][-1]["completion"]] if state["trajectory"] else []
            return bool(said) and said[-1]["content"].strip() == state["answer"]

        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": "wrong, again"}]

    rows = [{"question": "a number?", "answer": "7"}]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=3)
