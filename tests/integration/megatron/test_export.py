"""`slipstream export` of a checkpoint: transformers and vLLM load the folder and compute what the learner computed."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from common.config.schema import Config, LearnerConfig, ModelConfig, ParallelConfig, RunConfig, TasksConfig
from common.errors import UsageError
from common.process.lifecycle import leave
from common.process.run_dir import RunDir
from learner.checkpoint.folder import CheckpointFolder, StreamState, TrainerState
from tests.rigs import forked_ranks, tiny_models, warm_engines
from tests.rigs.configs import run_cli
from tests.rigs.forked_ranks import Outcome, group, same
from tests.rigs.processes import Forked, write_to
from tests.rigs.tiny_models import TEMPERATURE, exported, figures, microbatches
from tests.rigs.waiting import LIMIT_S

STEPS = 2
RUNS = [
    {"name": "tp2", "kind": "served", "parallel": {"tensor": 2}},
    {"name": "ep2", "kind": "moe", "parallel": {"expert": 2}},
    {"name": "pp2-bf16", "kind": "served", "dtype": "bfloat16", "parallel": {"pipeline": 2}},
]


def prompt_logits(model: Path, documents: list[list[int]], answer: Path) -> None:
    """Let vLLM write to `answer` the logits of every place of every document but its first token."""
    write_to(answer.with_suffix(".log"))
    os.environ |= warm_engines.SETTINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64,
        kv_cache_memory_bytes=16 << 20, max_num_seqs=8, logprobs_mode="raw_logits", max_logprobs=-1,
    )  # fmt: skip
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": d} for d in documents], wanted, use_tqdm=False)
    rows = [[[place[t].logprob for t in range(len(place))] for place in o.prompt_logprobs[1:]] for o in outputs]
    answer.write_text(json.dumps(rows))
    leave(0)


def job_train(folder: Path, spec: dict[str, Any]) -> None:
    """A run folder as the training loop leaves it, with one checkpoint."""
    backend = tiny_models.backend(folder, spec)
    for number in range(STEPS):
        figures(backend, number)
    run = RunDir(folder / spec["name"])
    checkpoints = CheckpointFolder(run.checkpoints, keep=1)
    begun = b""
    if backend.rank == 0:
        run.prepare(
            Config(
                run=RunConfig(name=spec["name"], dir=str(run.path), steps=9),
                model=ModelConfig(path=str(folder / "models" / spec["kind"]), dtype=spec.get("dtype", "float32")),
                tasks=TasksConfig(environment="none", dataset="none"),
                learner=LearnerConfig(world_size=2, parallel=ParallelConfig(**spec["parallel"])),
            )
        )
        begun = str(checkpoints.begin(STEPS)).encode()
    tiny_models.save_checkpoint(backend, Path(backend.broadcast_bytes(begun if backend.rank == 0 else None).decode()))
    if backend.rank == 0:
        checkpoints.finish(TrainerState(policy_version=STEPS, incarnation=0, tasks=StreamState()))
    tensors = tiny_models.logprobs(backend) | exported(backend, "weight")
    forked_ranks.write(folder / "found" / spec["name"], backend.rank, tensors, {})


def job_export(folder: Path, spec: dict[str, Any]) -> None:
    """Export as the process of `slipstream export` does, without its imports; writes the message if it refuses."""
    from learner.checkpoint import export_main
    from learner.megatron import parallel

    run = RunDir(folder / spec["name"])
    if other := spec.get("model"):
        config = run.path / "config.yaml"
        config.write_text(config.read_text().replace(f"models/{spec['kind']}", f"models/{other}"))
    words = ["--config", str(run.path / "config.yaml"), "--checkpoint", str(run.checkpoints / "step-000002")]
    said = ""
    with patch.object(parallel, "shutdown"):  # the world goes on
        try:
            export_main.run([*words, "--out", str(folder / f"{other or spec['name']}-exported")])
        except UsageError as error:
            said = str(error)
    forked_ranks.write(folder / "exports" / (other or spec["name"]), 0, {}, {"said": said})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders, and next to them what `slipstream export` made of their checkpoints: its process, of the first."""
    wrong = RUNS[1] | {"model": "served"}
    exports = [{key: spec[key] for key in ("name", "kind", "model") if key in spec} for spec in (*RUNS[1:], wrong)]
    place = forked_ranks.run(
        tmp_path_factory,
        group(tiny_models.job_models, [{"kinds": ["served", "moe"]}]),
        group(job_train, RUNS, shared=True),
        group(job_export, exports),
    )
    spec = RUNS[0]
    done = run_cli("export", str(place / spec["name"]), str(place / f"{spec['name']}-exported"), "--step", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"step-000002 of {place / spec['name']} is in" in done.stdout
    return place


@forked_ranks.named(RUNS)
def test_the_folder_holds_the_weights_of_the_checkpoint_and_the_sources_other_files(
    folder: Path, spec: dict[str, Any]
) -> None:
    exported, source = folder / f"{spec['name']}-exported", folder / "models" / spec["kind"]
    assert {f.name for f in exported.iterdir()} == {f.name for f in source.iterdir()}
    same(load_file(exported / "model.safetensors"), Outcome(folder / "found" / spec["name"]).section("weight"))


@forked_ranks.named(RUNS)
def test_transformers_computes_what_the_learner_computed(folder: Path, spec: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / f"{spec['name']}-exported", dtype=torch.float32)
    found = Outcome(folder / "found" / spec["name"]).section("logprobs")
    expected = {str(i): tiny_models.hugging_face(model, batch)[0].detach() for i, batch in enumerate(microbatches(0))}
    same(found, expected, atol=2e-5 if spec.get("dtype") is None else 0.3)


def test_vllm_computes_what_the_learner_computed(folder: Path, tmp_path: Path) -> None:
    batch = microbatches(0)[0]
    rows = zip(batch.tokens.split(batch.document_lengths), batch.targets.split(batch.document_lengths), strict=True)
    documents = [[*tokens.tolist(), int(targets[-1])] for tokens, targets in rows]
    answer = tmp_path / "rows.json"
    engine = Forked(warm_engines.WarmProcess, prompt_logits, folder / "tp2-exported", documents, answer)
    assert engine.wait(LIMIT_S) == 0, answer.with_suffix(".log").read_text()[-3000:]
    rows = json.loads(answer.read_text())
    logits = torch.tensor([place for document in rows for place in document])
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    found = log_p.gather(1, batch.targets[:, None]).squeeze(1)
    expected = Outcome(folder / "found" / "tp2").section("logprobs")["0"]
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing(folder: Path) -> None:
    (found,) = Outcome(folder / "exports" / "served").ranks
    assert "expert 2" in found["said"] and "one rank" in found["said"]
    assert not list(folder.glob("*served-exported*"))
