"""Tasks that `reasoning-gym` generates, verified by its own scorers.

    tasks:
      environment: reasoning_gym
      options: {name: leg_counting, parameters: '{"max_animals": 5}'}
      dataset: runs/legs.jsonl            # export_rows, once
      limits: {python: .venv-adapters/bin/python}

A task is generated again from its number, so that the scorer sees what the generator made, not a copy as JSON.
"""

import functools
import json
from pathlib import Path
from typing import Any

from rollout_fleet.environments.protocol import Action, Chat, Limits, StepResult

PROMPT = "{question}\n\nGive the final answer between <answer> and </answer>."


class ReasoningGym:
    """Single turn. Problem: {"index": 3} and what else export_rows writes.

    Options:
        name: of the dataset (reasoning_gym.factory.DATASETS).
        parameters: of its generator, as a JSON object.
        tasks_seed: of its generator.
        prompt: template with {question}. The answer is what the last pair of <answer> tags contains.
    """

    NEEDS = ("reasoning_gym",)
    PRELOAD = NEEDS
    LIMITS = Limits(process=True, memory_mib=8192)  # address space; scorers compute with what the policy said

    def __init__(
        self,
        problem: dict[str, Any],
        *,
        seed: int,
        name: str,
        parameters: str = "{}",
        tasks_seed: int = 0,
        prompt: str = PROMPT,
    ) -> None:
        self._dataset = _dataset(name, parameters, tasks_seed)
        self._entry = self._dataset[problem["index"]]
        if problem.get("question", self._entry["question"]) != self._entry["question"]:
            raise ValueError(f"task {problem['index']} of {name} differs: export the rows with these options")
        self._prompt = prompt

    async def reset(self) -> Chat:
        return Chat((("user", self._prompt.replace("{question}", self._entry["question"])),))

    async def step(self, action: Action) -> StepResult:
        from reasoning_gym.utils import extract_answer  # pyright: ignore[reportMissingImports]

        answer = extract_answer(action.text)
        try:
            score = self._dataset.score_answer(answer, self._entry)
        except Exception:  # some scorers, such as prime_factorization's, raise for what they cannot read
            self._dataset.score_answer(self._entry["answer"], self._entry)  # raises where the answer is not to blame
            score = 0.0
        return StepResult(reward=float(score), metrics={"answered": float(answer is not None)})


def export_rows(name: str, path: Path, rows: int, parameters: str = "{}", tasks_seed: int = 0) -> None:
    """Write the first `rows` tasks as the JSONL file of tasks.dataset; needs reasoning-gym."""
    dataset = _dataset(name, parameters, tasks_seed)
    with path.open("w", encoding="utf-8") as file:
        for index in range(rows):
            entry = dataset[index]
            row = {"index": index, "question": entry["question"], "answer": entry["answer"]}
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")


@functools.cache
def _dataset(name: str, parameters: str, tasks_seed: int) -> Any:
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    return reasoning_gym.create_dataset(name, seed=tasks_seed, **json.loads(parameters))
