"""The tasks of bench/trl_comparison.py in TRL's words: problems, rewards, and the turns of the game.

The game's environment is Slipstream's own class. TRL's trainers play it through their `rollout_func`; the asynchronous
trainer's worker plays it in its own loop, as its harness for tools does.
"""

import argparse
import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import harness
from trl.experimental.async_grpo import async_rollout_worker as worker

from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action


def problems(args: argparse.Namespace) -> Any:
    """The task's rows in an order of the seed, as often as the steps need."""
    import torch
    from datasets import Dataset

    rows = harness.json_lines(Path(args.dataset))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed)).tolist()
    chosen = [rows[order[i % len(rows)]] for i in range(args.prompts * (args.steps + 2))]
    if ":" in args.task:
        games = [class_of(args.task)(row, seed=0) for row in chosen]
        prompts = [asyncio.run(game.reset()) for game in games]
        return Dataset.from_dict({"prompt": prompts, "problem": [json.dumps(row) for row in chosen]})
    if args.task == "number_guessing":
        return Dataset.from_dict({"prompt": [str(row["number"]) for row in chosen]})
    return Dataset.from_dict(
        {"prompt": [f"Q: {r['question']}=? A:" for r in chosen], "answer": [str(r["answer"]) for r in chosen]}
    )


def conversations(data: Any) -> Any:
    """The same rows as the asynchronous trainer takes them."""
    return data.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})


class AdditionReward:
    """1 for the right sum behind the last `=`, ended by the model. The asynchronous worker pickles it: a class."""

    __name__ = "reward"

    def __init__(self, end: int) -> None:
        self.end = end

    def __call__(self, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        ended = [bool(ids) and list(ids)[-1] == self.end for ids in completion_ids]
        texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        texts = [text.replace("<eos>", "").strip().split("=")[-1].strip() for text in texts]
        return [float(e and t == a) for e, t, a in zip(ended, texts, answer, strict=True)]


def class_of(task: str) -> Any:
    """The class that module:Class names."""
    module, _, name = task.partition(":")
    return getattr(importlib.import_module(module), name)


class OneTurnReward:
    """The reward of an environment of one turn, given as module:Class."""

    __name__ = "reward"

    def __init__(self, task: str, end: int) -> None:
        self.environment = class_of(task)
        self.end = end

    def __call__(self, completions: Any, completion_ids: Any, problem: Any, **_: Any) -> list[float]:
        return [self.of(*one) for one in zip(completions, completion_ids, problem, strict=True)]

    def of(self, text: str, ids: list[int], problem: str) -> float:
        ended = bool(ids) and list(ids)[-1] == self.end
        action = Action(text=text.replace("<eos>", ""), tokens=tuple(ids), ended=ended)
        return asyncio.run(self.environment(json.loads(problem), seed=0).step(action)).reward


def game_reward(completions: Any, won: Any = None, **_: Any) -> list[float]:
    """The environment's reward, from `play` or from the asynchronous loop."""
    return won if won is not None else [messages[-1]["won"] for messages in completions]


class Episode:
    """One game: `ids` begins with the prompt, and `mask` has 1 for sampled tokens behind it."""

    def __init__(self, number: str, tokenizer: Any) -> None:
        self.game = NumberGuessing({"number": int(number)}, seed=0)
        self.tokenizer = tokenizer
        self.prompt_ids: list[int] = []
        self.ids: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.reward: float | None = None  # None: the game goes on

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    async def begin(self) -> None:
        self.prompt_ids = self.encode(str(await self.game.reset()))
        self.ids = list(self.prompt_ids)

    async def take(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Put the model's turn and the environment's answer behind it."""
        ended = ids[-1] == self.tokenizer.eos_token_id
        text = self.tokenizer.decode(ids[:-1] if ended else ids)
        result = await self.game.step(Action(text=text, tokens=tuple(ids), ended=ended))
        answer = [] if result.done else self.encode(str(result.observation))
        self.ids += [*ids, *answer]
        self.mask += [1] * len(ids) + [0] * len(answer)
        self.logprobs += [*(logprobs or [0.0] * len(ids)), *[0.0] * len(answer)]
        self.reward = result.reward if result.done else None


async def begin_all(episodes: list[Episode]) -> None:
    for episode in episodes:
        await episode.begin()


async def take_all(episodes: list[Episode], ids: list[list[int]], logprobs: list[list[float]] | None) -> None:
    for at, (episode, turn) in enumerate(zip(episodes, ids, strict=True)):
        await episode.take(list(turn), list(logprobs[at]) if logprobs else None)


def play(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's `rollout_func`: all games of a batch, turn by turn, by the trainer's own way of generating."""
    episodes = [Episode(number, trainer.processing_class) for number in prompts]
    asyncio.run(begin_all(episodes))
    sampled = None
    while live := [episode for episode in episodes if episode.reward is None]:
        ids, sampled = trainer._generate_single_turn([episode.ids for episode in live], None, {}, 1)
        asyncio.run(take_all(live, ids, sampled))
    return {
        "prompt_ids": [episode.prompt_ids for episode in episodes],
        "completion_ids": [episode.ids[len(episode.prompt_ids) :] for episode in episodes],
        "logprobs": sampled and [episode.logprobs for episode in episodes],
        "env_mask": [episode.mask for episode in episodes],
        "won": [episode.reward for episode in episodes],
    }


class GameLoop(worker._AsyncRolloutLoop):
    """The asynchronous worker's loop with the game's turns."""

    async def _generate_one(self, prompt: Any, tool_dict: Any, tools: Any, group_id: int = 0) -> Any:
        episode = Episode(prompt[0]["content"], self.tokenizer)
        await episode.begin()
        turns = []
        while episode.reward is None:
            asked = list(episode.ids)
            ids, logprobs = await self._generate_one_turn(asked)
            turns.append(worker.TurnRecord(asked, ids, logprobs))
            await episode.take(ids, logprobs)
        rows, tally = worker._chain_to_sequences(turns, str(group_id), self._fork_threshold_tokens)
        completion_ids = episode.ids[len(episode.prompt_ids) :]
        self._push_rollout_metrics(
            turns=len(turns), sequences=len(rows), completion_ids=completion_ids, tally=tally, loop_exhausted=False,
            duration_s=0.0,
        )  # fmt: skip
        text = self.tokenizer.decode(completion_ids)
        completion = [{"role": "assistant", "content": text, "won": episode.reward}]
        return completion, completion_ids, rows, 0, 0, None


class GameWorker(worker.AsyncRolloutWorker):
    _loop_cls = GameLoop
