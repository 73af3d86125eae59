"""`python -m learner.main` as a real process: it learns, writes a model that loads, and refuses bad input."""

import os
import subprocess
import sys
from pathlib import Path

from common.metrics import SftMetrics, read_metrics
from tests.waiting import LIMIT_S

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PAIRS = [("Q: 1+2=? A:", " =3"), ("Q: 40+2=? A:", " =42"), ("Q: 5+5=? A:", " 5+5=10 =10"), ("Guess 1-31\n", "16")]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=LIMIT_S, env=ENVIRONMENT, check=False
    )


def sft(config: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    words = ["--standalone", "--nproc-per-node", str(ranks), "-m", "learner.main", "--config", str(config)]
    return python("-m", "learner.torchrun", *words)


def write_config(folder: Path, model: Path, rows: str, steps: int = 60, **learner: object) -> Path:
    (folder / "rows.jsonl").write_text(rows)
    options = "".join(f", {name}: {value}" for name, value in learner.items())
    path = folder / "sft.yaml"
    path.write_text(
        f"run: {{name: warm, dir: {folder}/run, steps: {steps}}}\n"
        f"model: {{path: {model}, dtype: float32}}\n"
        f"tasks: {{dataset: {folder}/rows.jsonl}}\n"
        f"learner: {{sequences_per_step: 4, optimizer: {{lr: 5.0e-3, warmup_steps: 5}}{options}}}\n"
    )
    return path


def as_rows(pairs: list[tuple[str, str]]) -> str:
    import json

    return "".join(json.dumps({"prompt": prompt, "completion": completion}) + "\n" for prompt, completion in pairs)


COMPLETE = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
for prompt in sys.argv[2:]:
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    for _ in range(20):
        token = model(ids).logits[0, -1].argmax()
        if token == tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, token.view(1, 1)], 1)
    print(repr(tokenizer.decode(ids[0]).replace(prompt, "", 1)), bool(token == tokenizer.eos_token_id))
"""


def test_two_ranks_learn_the_rows_and_the_model_says_them_back(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, as_rows(PAIRS), world_size=2)
    done = sft(config, ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl", SftMetrics)
    assert [line.step for line in lines] == list(range(60))
    assert lines[0].loss > 3.0 > 0.1 > lines[-1].loss
    assert {line.tokens_trained for line in lines} == {sum(len(completion) + 1 for _, completion in PAIRS)}
    said = python("-c", COMPLETE, str(tmp_path / "run" / "model"), *(prompt for prompt, _ in PAIRS))
    assert said.stdout.splitlines() == [f"{completion!r} True" for _, completion in PAIRS], said.stderr


def test_a_row_longer_than_the_bound_ends_with_code_2_and_names_the_key(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, as_rows([("a" * 50, "b")]), micro_batch_tokens=32)
    done = sft(config)
    assert done.returncode == 2, done.stderr
    assert "rows.jsonl line 1 needs 51 tokens" in done.stderr
    assert "learner.micro_batch_tokens is 32" in done.stderr
    assert not (tmp_path / "run" / "model").exists()


def test_a_bad_row_ends_with_code_2_before_the_model_is_loaded(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, '{"prompt": "a", "completion": "b"}\n{"question": "c"}\n')
    done = python("-m", "learner.main", "--config", str(config))
    assert done.returncode == 2, done.stderr
    assert "rows.jsonl line 2" in done.stderr
