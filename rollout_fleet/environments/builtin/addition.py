"""Addition with a scratchpad: `Q: 384+519=? A:`, judged by what stands after the last `=`."""

from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult


class Addition:
    """Single turn. Problem: {"question": "384+519", "answer": "903"}.

    Options:
        prompt: template of the prompt, with {question}.
        answer_after: the answer is the text after its last occurrence, stripped.
    """

    def __init__(
        self, problem: dict[str, Any], *, seed: int, prompt: str = "Q: {question}=? A:", answer_after: str = "="
    ) -> None:
        missing = [key for key in ("question", "answer") if key not in problem]
        if missing:
            raise ValueError(f"the problem has no {' and no '.join(map(repr, missing))}: {problem}")
        self.prompt = prompt.format(question=problem["question"])
        self.answer = str(problem["answer"]).strip()
        self.answer_after = answer_after

    async def reset(self) -> str:
        return self.prompt

    async def step(self, action: Action) -> StepResult:
        """Reward 1 when the answer is right and the policy ended its turn itself."""
        given = action.text.rsplit(self.answer_after, 1)[-1].strip()
        return StepResult(reward=float(action.ended and given == self.answer))
