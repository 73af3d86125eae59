"""After a flip every architecture decodes as a fresh engine that was started from a folder with the new weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.rigs import forked_engines
from tests.rigs.engines import logprobs, worst
from tests.rigs.processes import ROOT
from tests.rigs.tiny_models import ARCHITECTURES
from tests.rigs.waiting import LIMIT_S

HEADS = {"head_dim": 32}  # vLLM has no smaller heads on a CPU
LATENT = {  # its kernels have one size of latent attention, and it reads two keys that transformers leaves out
    **dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, rms_norm_eps=1e-6),
    **dict(topk_method="noaux_tc", scoring_func="sigmoid"),
}
AMX = {"amx": True, "dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, keys of its config, keys of the spec
    "Qwen2": ("qwen2", dict(hidden_size=128), {}),
    "Qwen3": ("served", {}, {}),
    "Llama": ("llama", HEADS, {}),
    "Mistral": ("mistral", HEADS, {}),
    "Mixtral": ("mixtral", HEADS, {}),
    "Qwen3Moe": ("moe", HEADS, {}),
    "DeepseekV3": ("deepseek-v3", LATENT, {}),
    "DeepseekV3-plain-rope": ("deepseek-v3-plain", LATENT, {}),
    "DeepseekV3-copies": ("deepseek-v3", LATENT, {"copies": True}),
    "DeepseekV3-AMX": ("deepseek-v3", LATENT, AMX),
    "Glm4Moe": ("glm", HEADS, {}),
    "Glm4Moe-rounded": ("glm", HEADS, {"dtype": "bfloat16"}),  # with routers in float32
}
NARROW = torch.cpu._is_avx512_bf16_supported()
CLOSE = 1e-4  # to plain transformers, the worst token
CLOSE_ROUNDED = 0.05  # in bfloat16 the median: rounding sends some tokens to other experts


def spec(name: str, flips: bool) -> dict[str, Any]:
    kind, changes, more = CASES[name]
    changes = {"num_hidden_layers": 2, **changes}
    return {"kind": kind, "changes": changes, "dtype": "float32", **more, "flips": flips}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engines of the chosen cases, and of those that show the library."""
    made = tmp_path_factory.mktemp("engines")
    chosen = {
        item.callspec.params["name"] for item in request.session.items if item.path == request.path and "[" in item.name
    }
    chosen |= {"Qwen3", "DeepseekV3", "DeepseekV3-AMX"}
    if not NARROW:
        chosen.remove("DeepseekV3-AMX")
    specs = [spec(name, flips) for name in CASES if name in chosen for flips in (False, True)]
    (made / "specs.json").write_text(json.dumps(specs))
    command = [sys.executable, "-m", forked_engines.__name__, str(made)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=6 * LIMIT_S)
    return made


def found(folder: Path, name: str, flips: bool) -> dict[str, Any]:
    number = json.loads((folder / "specs.json").read_text()).index(spec(name, flips))
    answer = folder / f"{number}.json"
    assert answer.exists(), (folder / f"{number}.log").read_text()[-4000:]
    return json.loads(answer.read_text())


def test_every_supported_architecture_is_tried() -> None:
    assert {name.partition("-")[0] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_a_flipped_engine_decodes_as_a_fresh_one_and_as_transformers(folder: Path, name: str) -> None:
    if "amx" in CASES[name][2] and not NARROW:
        pytest.skip("the kernels of AMX_MLA need a CPU with AVX512-BF16")
    fresh, flipped = found(folder, name, False), found(folder, name, True)
    assert flipped["decoded"] == fresh["decoded"], "bit by bit: the same kernels with the same weights"
    made = spec(name, False)
    model = forked_engines.model_of(made, 1)
    for prompt, (tokens, values) in zip(forked_engines.PROMPTS, flipped["decoded"], strict=True):
        assert len(tokens) == forked_engines.TOKENS
        expected = logprobs(model, prompt + tokens)[len(prompt) - 1 :]
        if made["dtype"] == "float32":
            assert worst(values, expected) < CLOSE
        else:
            assert median(abs(a - b) for a, b in zip(values, expected, strict=True)) < CLOSE_ROUNDED


def test_latent_attention_ran_with_both_backends_and_the_library_of_this_cpu(folder: Path) -> None:
    assert found(folder, "DeepseekV3", True)["backends"] == ["CPUMLAImpl"]
    wide = torch.cpu._is_avx512_supported()
    library = "_C.abi3.so" if NARROW else "_C_AVX512.abi3.so" if wide else "_C_AVX2.abi3.so"
    assert found(folder, "Qwen3", True)["libraries"] == [library]
    if NARROW:
        assert found(folder, "DeepseekV3-AMX", True)["backends"] == ["AMXMLAImpl"]
