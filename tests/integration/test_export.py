"""`slipstream export` of a checkpoint: transformers and vLLM load the folder and compute what the learner computed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration import fork_rig, tiny_models
from tests.integration.fork_rig import ROOT, Outcome, group
from tests.waiting import LIMIT_S

RUNS = [
    {"name": "tp2", "kind": "served", "parallel": {"tensor": 2}},
    {"name": "ep2", "kind": "moe", "parallel": {"expert": 2}},
    {"name": "pp2-bf16", "kind": "served", "dtype": "bfloat16", "parallel": {"pipeline": 2}},
]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
VLLM = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
from common.process.lifecycle import leave
from vllm import LLM, SamplingParams
model, documents, temperature = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
engine = LLM(model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
             kv_cache_memory_bytes=16 << 20, max_num_seqs=8, logprobs_mode="raw_logits", max_logprobs=-1)
wanted = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
outputs = engine.generate([{"prompt_token_ids": d} for d in documents], wanted, use_tqdm=False)
rows = [[[place[t].logprob for t in range(len(place))] for place in o.prompt_logprobs[1:]] for o in outputs]
print(json.dumps(rows))
leave(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders, and next to them what `slipstream export` made of their checkpoints."""
    place = tmp_path_factory.mktemp("export")
    worlds = [
        group(1, "models", [{"kind": "served"}, {"kind": "moe"}]),
        group(2, "train", RUNS),
    ]
    fork_rig.run("export_workers", place, worlds)
    for spec in RUNS:
        done = slipstream("export", str(place / spec["name"]), str(place / f"{spec['name']}-exported"), "--step", "2")
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"step-000002 of {place / spec['name']} is in" in done.stdout
    return place


def slipstream(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("spec", RUNS, ids=[s["name"] for s in RUNS])
def test_the_folder_holds_the_weights_of_the_checkpoint_and_the_sources_other_files(
    folder: Path, spec: dict[str, Any]
) -> None:
    exported, source = folder / f"{spec['name']}-exported", folder / "models" / spec["kind"]
    assert {f.name for f in exported.iterdir()} == {f.name for f in source.iterdir()}
    weights = load_file(exported / "model.safetensors")
    trained = Outcome(folder / "found" / spec["name"]).section("weight")
    assert weights.keys() == trained.keys()
    for name, weight in trained.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("spec", RUNS, ids=[s["name"] for s in RUNS])
def test_transformers_computes_what_the_learner_computed(folder: Path, spec: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / f"{spec['name']}-exported", dtype=torch.float32)
    found = Outcome(folder / "found" / spec["name"]).section("logprobs")
    tolerance = 2e-5 if spec.get("dtype") is None else 0.3
    for i, batch in enumerate(tiny_models.microbatches(0)):
        expected = tiny_models.hugging_face_logprobs(model, batch)
        torch.testing.assert_close(found[str(i)], expected, rtol=0, atol=tolerance)


def test_vllm_computes_what_the_learner_computed(folder: Path) -> None:
    batch = tiny_models.microbatches(0)[0]
    documents, at = [], 0
    for n in batch.document_lengths:
        documents.append([*batch.tokens[at : at + n].tolist(), int(batch.targets[at + n - 1])])
        at += n
    words = [str(folder / "tp2-exported"), json.dumps(documents), "1.0"]
    command = [sys.executable, "-c", VLLM, *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    logits = torch.tensor([place for document in rows for place in document])
    log_p = (logits / tiny_models.TEMPERATURE).log_softmax(-1)
    found = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    expected = Outcome(folder / "found" / "tp2").section("logprobs")["0"]
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing(folder: Path) -> None:
    run = folder / "tp2"
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("models/served", "models/moe"))
    done = slipstream("export", str(run), str(folder / "wrong"))
    config.write_text(text)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "written under tensor 2, does not load under one rank with this model" in done.stderr
    assert not list(folder.glob("*wrong*"))
