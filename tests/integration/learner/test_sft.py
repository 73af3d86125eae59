"""A warm start learns its rows, writes a model that says them back, and refuses bad input."""

import json
from pathlib import Path
from typing import Any

import torch
from pyarrow import Table
from pyarrow.parquet import write_table

from common.config.loading import load_either
from common.metrics import SftMetrics
from tests.rigs.hub import hub_standin
from tests.rigs.jobs import Run
from tests.rigs.processes import Process

PAIRS = [("Q: 1+2=? A:", " =3"), ("Q: 40+2=? A:", " =42"), ("Q: 5+5=? A:", " 5+5=10 =10"), ("Guess 1-31\n", "16")]


class WarmStart(Run):
    metrics = SftMetrics

    def __init__(self, folder: Path, model: Path, rows: list[dict[str, str]], **learner: Any) -> None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shared = {"sequences_per_step": 4, "optimizer": {"lr": 5e-3, "warmup_steps": 5}}
        document = {
            "run": {"name": "warm", "dir": f"{folder}/run", "steps": 60},
            "model": {"path": str(model), "dtype": "float32"},
            "tasks": {"dataset": f"{folder}/rows.jsonl"},
            "learner": shared | learner,
        }
        super().__init__(folder, document)

    def refusal(self) -> str:
        """The message of the learner, which ends with code 2."""
        self.finish(code=2)
        assert not self.run.model.exists()
        return (self.run.logs / "sft-0.log").read_text()


def completed(model: Any, tokenizer: Any, prompt: str) -> str:
    """The text that a model adds to a prompt until it ends."""
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    for _ in range(20):
        token = model(ids).logits[0, -1].argmax()
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(ids[0]).removeprefix(prompt)
        ids = torch.cat([ids, token.view(1, 1)], 1)
    raise AssertionError("no end")


def test_two_ranks_learn_the_rows_and_the_model_says_them_back(tmp_path: Path, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = WarmStart(tmp_path, model, [{"prompt": p, "completion": c} for p, c in PAIRS], world_size=2)
    job.finish(ranks=2)
    lines = job.lines()
    assert [line.step for line in lines] == list(range(60))
    assert lines[0].loss > 3.0 > 0.1 > lines[-1].loss
    assert {line.tokens_trained for line in lines} == {sum(len(completion) + 1 for _, completion in PAIRS)}
    trained = AutoModelForCausalLM.from_pretrained(job.run.model), AutoTokenizer.from_pretrained(job.run.model)
    assert [completed(*trained, prompt) for prompt, _ in PAIRS] == [completion for _, completion in PAIRS]


def test_model_and_rows_may_come_from_the_hub_and_the_run_keeps_their_names(tmp_path: Path, model: Path) -> None:
    rows = [{"prompt": p, "completion": c} for p, c in PAIRS]
    job, names = WarmStart(tmp_path, model, rows, world_size=2), ("own/model", "hf://datasets/own/rows/train-*.parquet")
    write_table(Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = job.config.read_text().replace(str(model), names[0]).replace(f"{tmp_path}/rows.jsonl", names[1])
    job.config.write_text(config.replace("steps: 60", "steps: 2"))
    with hub_standin() as hub:
        hub.repos["models/own/model"] = {file.name: file.read_bytes() for file in model.iterdir()}
        hub.repos["datasets/own/rows"] = {"train-00000-of-00001.parquet": (tmp_path / "rows.parquet").read_bytes()}
        with Process(tmp_path / "ranks.log", job.words(2), **hub.environment(tmp_path / "home")) as learner:
            assert learner.wait() == 0, learner.output()
    assert max(hub.requests["GET model.safetensors"], hub.requests["GET train-00000-of-00001.parquet"]) == 1
    resolved = load_either(job.run.config)
    assert (resolved.model.path, resolved.tasks.dataset) == (f"hf://{names[0]}", names[1])
    assert len(job.lines()) == 2
    assert {file.name for file in model.iterdir()} <= {file.name for file in job.run.model.iterdir()}


def test_a_row_longer_than_the_bound_ends_with_code_2_and_names_the_key(tmp_path: Path, model: Path) -> None:
    said = WarmStart(tmp_path, model, [{"prompt": "a" * 50, "completion": "b"}], micro_batch_tokens=32).refusal()
    for fact in ("rows.jsonl", "line 1 ", "51 tokens", "learner.micro_batch_tokens", " 32"):
        assert fact in said


def test_a_bad_row_ends_with_code_2_and_names_the_line(tmp_path: Path, model: Path) -> None:
    said = WarmStart(tmp_path, model, [{"prompt": "a", "completion": "b"}, {"question": "c"}]).refusal()
    assert "rows.jsonl" in said and "line 2" in said
