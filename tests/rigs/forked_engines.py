"""Engines forked from one process that has imported vLLM once; each runs in its own process and answers in a file.

`python -m tests.rigs.forked_engines FOLDER` reads FOLDER/specs.json. A spec names a kind of model of
tiny_models.py. A fresh engine loads the new model's folder. One that flips starts with random weights, flips to an old
model and then to the new one. Both answer with the tokens that they decode.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from common.process.lifecycle import die_with_parent
from common.weights.wire import flat_buffer
from common.weights.wire.layout import Layout
from rollout_fleet.vllm_patches.engine_start import import_vllm
from rollout_fleet.weights.weight_proof import whole_checksum
from tests.rigs.tiny_models import in_files, new_model

AT_ONCE = 2
PROMPTS = [[(i * 7 + j * 3) % 90 + 4 for j in range(12)] for i in range(3)]
TOKENS = 24
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def model_of(spec: dict[str, Any], seed: int) -> Any:
    model = new_model(spec["kind"], seed, **spec["changes"])
    biases = {name: bias.clone() for name, bias in model.named_buffers() if "e_score" in name}
    model.to(getattr(torch, spec["dtype"]))
    for name, bias in biases.items():  # routers select by float32, as the learner exports it
        model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
    return model


def run(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run one engine; its backends, vLLM's library, and per prompt (decoded tokens, their log-probabilities)."""
    from vllm.model_executor.layers.attention import mla_attention

    if spec.get("amx"):  # vLLM's kernels run on any CPU with bfloat16 products; it asks for the tiles only
        torch.cpu._is_amx_tile_supported = lambda: True
    model = model_of(spec, 1)
    if spec.get("copies"):  # as backends do that quantise, pack or gather them
        split = mla_attention.split_kv_b_proj
        mla_attention.split_kv_b_proj = lambda *given: tuple(part.clone() for part in split(*given))
    model.save_pretrained(folder)
    llm = start(spec, folder)
    if spec["flips"]:
        for version, seed in enumerate((2, 1)):
            flip(llm, version, model_of(spec, seed))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    backends = {type(m.impl).__name__ for m in worker.model_runner.get_model().modules() if hasattr(m, "impl")}
    with open("/proc/self/maps", encoding="utf-8") as maps:
        libraries = {line.split("/")[-1].strip() for line in maps if "/vllm/_C" in line}
    return {"backends": sorted(backends), "libraries": sorted(libraries), "decoded": decode(llm)}


def start(spec: dict[str, Any], folder: Path) -> Any:
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    return LLM(
        model=str(folder), dtype=spec["dtype"], load_format="dummy" if spec["flips"] else "auto", max_model_len=64,
        max_num_seqs=4, kv_cache_memory_bytes=16 << 20, enforce_eager=True, distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs", skip_tokenizer_init=True, disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend="slipstream"),
        attention_backend="CPU_MLA" if spec["dtype"] == "float32" else None,
    )  # fmt: skip


def flip(llm: Any, version: int, model: Any) -> None:
    """A flip as an engine process makes it, of a version that is there already."""
    named = sorted(in_files(model).items())
    layout = Layout.of([(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in named])
    flat = flat_buffer.pack(named, layout)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    engine = worker.weight_transfer_engine
    engine.receiver.layout = layout
    engine.workers.take = lambda *_: flat
    engine.receiver.give_back = lambda _: None
    worker.start_weight_update()
    worker.update_weights({"incarnation": 0, "version": version})
    worker.finish_weight_update()
    engine._proving.join()
    assert whole_checksum([engine.proof]) == flat_buffer.version_checksum(flat, layout), engine.proof


def decode(llm: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    done = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    answers = [output.outputs[0] for output in done]
    return [
        (list(a.token_ids), [row[t].logprob for t, row in zip(a.token_ids, a.logprobs, strict=True)]) for a in answers
    ]


def _child(folder: Path, number: int, spec: dict[str, Any]) -> None:
    log = os.open(folder / f"{number}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        die_with_parent()
        (folder / f"{number}.json").write_text(json.dumps(run(spec, folder / f"model-{number}")))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(folder: Path) -> None:
    die_with_parent()
    os.environ |= ENVIRONMENT
    specs = json.loads((folder / "specs.json").read_text())
    import_vllm(sorted({type(model_of(spec, 0)).__name__ for spec in specs if spec["flips"]}))
    from vllm import LLM, SamplingParams  # noqa: F401  (so that no child imports them)

    running = 0
    for number, spec in enumerate(specs):
        if running == AT_ONCE:
            os.wait()
            running -= 1
        if os.fork() == 0:
            _child(folder, number, spec)
        running += 1
    for _ in range(running):
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
