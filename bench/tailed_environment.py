"""A model whose answers have heavy-tailed lengths by construction, and an environment that does not care.

The model is a real Qwen3 that computes everything a model computes, with output projections of zero. Its embeddings
make it a Markov chain. After the prompt it enters the long mode with probability `LONG`, else the short one. Each mode
ends an answer after its own mean number of tokens. Most answers are short and a few are long: then the generation of a
synchronous step is the wait for those few. Nothing is learned, so lengths stay the same.
"""

import math
import random
from pathlib import Path
from typing import Any

from rollout_fleet.environments.protocol import Action, StepResult

LONG = 0.04  # probability of a long answer
SHORT_MEAN, LONG_MEAN = 24, 700  # tokens
POSITIONS = 4096
IMPOSSIBLE = 1e-12
PROMPT = "Q: 1+1=? A:"


class Tailed:
    """One turn; the reward is a coin's."""

    def __init__(self, problem: dict[str, Any], *, seed: int) -> None:
        self._reward = float(random.Random(f"{problem['number']} {seed}").random() < 0.5)

    async def reset(self) -> str:
        return PROMPT

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=self._reward)


def build(folder: Path, problems: int = 4096) -> tuple[Path, Path]:
    """(model folder, dataset)."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    from launch.quickstart.assets import build as build_assets
    from launch.quickstart.assets import write_rows

    build_assets(folder, 1, "tiny")
    path = folder / "model"
    config = AutoConfig.from_pretrained(path)
    config.max_position_embeddings, config.tie_word_embeddings = POSITIONS, False
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = Qwen3ForCausalLM(config)
    _make_chain(model, tokenizer.encode(PROMPT, add_special_tokens=False)[-1], tokenizer.eos_token_id)
    model.save_pretrained(path)
    dataset = folder / "tailed.jsonl"
    write_rows(dataset, ({"number": i} for i in range(problems)))
    return path, dataset


def _make_chain(model: Any, prompt_end: int, end: int) -> None:
    """Let the next token depend on the last one's class alone: prompt, short, long."""
    import torch

    size, hidden = model.config.vocab_size, model.config.hidden_size
    free = [token for token in range(4, size) if token not in (prompt_end, end)]
    short, long = free[: len(free) // 2], free[len(free) // 2 :]
    state = torch.ones(size, dtype=torch.long)  # state after a last token: 0 prompt, 1 short, 2 long
    state[prompt_end], state[long] = 0, 2
    chance = torch.full((3, size), IMPOSSIBLE, dtype=torch.float64)
    chance[0, short], chance[0, long] = (1 - LONG) / len(short), LONG / len(long)
    chance[1, short], chance[1, end] = (1 - 1 / SHORT_MEAN) / len(short), 1 / SHORT_MEAN
    chance[2, long], chance[2, end] = (1 - 1 / LONG_MEAN) / len(long), 1 / LONG_MEAN
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[torch.arange(size), state] = 1.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :3] = (chance.log() / math.sqrt(hidden)).T.float()  # the norm makes sqrt(hidden) of 1
