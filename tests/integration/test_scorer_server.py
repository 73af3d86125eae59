"""`slipstream scorer` with vLLM on the CPU: raw scores as Hugging Face computes them, and a judge that answers."""

import asyncio
import signal
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
import yaml

from common.config.loading import load_config
from common.config.schema import Config
from launch.quickstart.assets import build_tokenizer
from rollout_fleet.scorers.check import check_scorers
from rollout_fleet.scorers.client import Scorer
from rollout_fleet.scorers.requests import Score
from tests.rigs.configs import document_of
from tests.rigs.processes import Command, descendants, kill, survivors, until
from tests.rigs.redis_servers import free_port
from tests.rigs.tiny_models import PLAIN, SHARED

TINY: dict[str, Any] = SHARED | {"head_dim": 32}  # vLLM has no smaller heads on a CPU
ANSWERS = ["yes", "Because 1+1=2.", "a much longer answer, " * 4]
KEY = "sk-of-this-test"


def write_models(folder: Path) -> Any:
    """FOLDER/reward and FOLDER/judge with the same tokenizer; returns the reward model."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = PLAIN
    config = transformers.Qwen3Config(**TINY | {"vocab_size": len(tokenizer), "num_labels": 2, "use_cache": False})
    torch.manual_seed(3)
    reward = transformers.Qwen3ForSequenceClassification(config).float().eval().requires_grad_(False)
    judge = transformers.Qwen3ForCausalLM(config).float()
    for model, name in ((reward, "reward"), (judge, "judge")):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return reward


def write_job(folder: Path) -> Path:
    serve = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 32 << 20}
    judge = {
        "model": "judge",
        "prompt": "{question} {completion}",
        "verdict": {"good": 1, "bad": -1},
        "extra": {"structured_outputs": {"choice": ["good", "bad"]}},
        "max_tokens": 8,
    }
    talk = [{"role": "user", "content": "{prompt}"}, {"role": "assistant", "content": "{completion}"}]
    reward = {"model": "reward", "kind": "classification", "label": 1, "prompt": talk, "api_key_env": "A_REWARDS_KEY"}
    scorers = {"judge": judge, "reward": reward}
    for name, scorer in scorers.items():
        scorer |= {"url": f"http://127.0.0.1:{free_port()}/v1", "serve": {**serve, "model": str(folder / name)}}
    tasks = {"environment": None, "prompt": "{question}", "reward": [{"scorer": name} for name in scorers]}
    (folder / "job.yaml").write_text(yaml.safe_dump({**document_of(folder, tasks=tasks), "scorers": scorers}))
    return folder / "job.yaml"


def scores(config: Config, name: str, answers: Sequence[str]) -> list[Score]:
    async def ask() -> list[Score]:
        scorer = Scorer(name, config.scorers[name])
        try:
            row = {"question": "1+1"}
            return [score for score, _ in await asyncio.gather(*(scorer.score("1+1", a, row) for a in answers))]
        finally:
            await scorer.close()

    return asyncio.run(ask())


def refusal_of(url: str, method: str) -> int:
    """The status of a refused request without a key."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method=method), timeout=10.0)
    caught.value.close()
    return caught.value.code


def expected(reward: Any, folder: Path, answer: str) -> float:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "reward")
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": answer}]
    ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), add_special_tokens=False).input_ids
    return reward(torch.tensor([ids])).logits[0, 1].item()


@pytest.mark.slow
def test_vllm_serves_raw_scores_and_verdicts_and_ends_with_its_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = write_models(tmp_path)
    job = write_job(tmp_path)
    monkeypatch.setenv("A_REWARDS_KEY", KEY)
    config = load_config(job)
    with Command(tmp_path, "reward", "scorer", str(job), "reward") as role:
        until("the server", lambda: "is served" in role.output(), role)
        found = scores(config, "reward", ANSWERS)
        for answer, score in zip(ANSWERS, found, strict=True):
            assert abs(score.value - expected(reward, tmp_path, answer)) < 1e-4
        for path in ("classify", "pooling", "tokenize", "invocations", "metrics"):
            for method in ("GET", "POST"):
                assert refusal_of(config.scorers["reward"].url.replace("v1", path), method) == 401
        assert KEY not in role.output()
        assert not any(KEY in " ".join(each.cmdline()) for each in descendants(role.process.pid))
        running = descendants(role.process.pid)
        assert len(running) >= 1
        kill(role.process.pid)
        assert survivors(running) == []
    with Command(tmp_path, "judge", "scorer", str(job), "judge") as role:
        until("the server", lambda: "is served" in role.output(), role)
        assert {score.value for score in scores(config, "judge", ANSWERS)} <= {1.0, -1.0}
        (away,) = check_scorers(config, "job.yaml")
        assert "scorers.reward" in away
        running = [psutil.Process(each.pid) for each in descendants(role.process.pid)]
        role.signal(signal.SIGTERM)
        assert role.wait() == 0, role.output()
        assert survivors(running) == []
