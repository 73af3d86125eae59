"""Adapters against Hugging Face's peft and autograd, in every layout; the model beneath them stays as it is.

One adapter of Megatron's stands beside a fused layer. So the modules of peft that belong to one share their A here, and
torch's AdamW steps them as one parameter.

Each layout is here for something of its own:

    tp2                  matrices that are cut, without sequence parallelism
    qwen2-tp2            with it, and with biases
    vpp2-recompute       pieces of a model with biases on each stage, whose activations are computed again
    cp2-selective, dp2   gradients that are summed over copies
    moe-tp2-ep2          attention that is cut, with sequence parallelism, beside experts that are spread
    offload              weights that come back
"""

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.weights.wire import flat_buffer
from common.weights.wire.adapters import merge_version
from common.weights.wire.layout import AdapterLayout, Layout
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import LOOSE
from tests.rigs.forked_ranks import Outcome, again, approximately, group, moved_alike, same, tried, worst
from tests.rigs.tiny_models import STEPS, TEMPERATURE, exported, figures, microbatches, numbered, policy_loss, share

LORA: dict[str, Any] = {"rank": 4, "alpha": 6.0}
ATTENTION = LORA | {"targets": ["linear_qkv", "linear_proj"]}
SHARED_A = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # whose A these have
REFERENCES = {  # name of the layout of one rank -> kind and adapters
    "one": ("tied", LORA),
    "qwen2-one": ("qwen2-deep", LORA | {"rank": 2, "targets": ["linear_qkv", "linear_fc1"]}),
    "moe-one": ("normed", ATTENTION),
}
STEPPED = {"lr": 3e-2}  # B starts at zero; larger steps let it matter
MOVED = 1e-3  # nats after the steps, which move more than 0.1; Adam enlarges rounding, which CPUs do differently


def layout(name: str, of: str = "one", ranks: int = 0, memory: dict[str, Any] | None = None, **parallel: Any) -> Any:
    kind, lora = REFERENCES[of]
    spec = {"name": name, "of": of, "kind": kind, "lora": lora, "parallel": parallel, "memory": memory or {}}
    return spec | {"ranks": ranks, "optimizer": STEPPED}


FULL = {"recompute": "full"}
OFFLOADED = {f"offload_{name}": True for name in ("optimizer", "gradients", "parameters")}
ALONE = [layout(name, of=name) for name in REFERENCES]
CUT = tried(
    [
        layout("offload", memory=OFFLOADED),
        layout("tp2", tensor=2, sequence=False),
        layout("vpp2-recompute", of="qwen2-one", memory=FULL, pipeline=2, virtual_pipeline=2),
        layout("cp2-selective", memory={"recompute": "selective"}, context=2),
        layout("dp2", ranks=2),
        layout("qwen2-tp2", of="qwen2-one", tensor=2),
        layout("moe-tp2-ep2", of="moe-one", tensor=2, expert=2),
    ]
)
LAYOUTS = [*ALONE, *CUT]
BF16 = layout("bf16") | {"dtype": "bfloat16"}
REFERRED = layout("referred") | {"reference": "other"}

SAVED_AT = 2  # steps before a checkpoint
SAVE = [
    layout(name, **cut) for name, cut in (("save-one", {}), ("save-tp2", {"tensor": 2}), ("save-dp2", {"ranks": 2}))
]
SAVE = tried([*SAVE, layout("save-vpp2", of="qwen2-one", pipeline=2, virtual_pipeline=2)])
DROPPED = [
    layout("save-dropout", memory=memory) | {"name": name, "lora": LORA | {"dropout": 0.3}}
    for name, memory in (("save-dropout", {}), ("save-dropout-recompute", FULL))
]
SAME = [  # shards of the optimizer's states, pieces of the model, and what dropout draws
    spec | {"name": f"{spec['name']}-again", "checkpoint": spec["name"]} for spec in (*SAVE[2:], DROPPED[1])
]
OTHER = tried(
    [  # whole adapters that get cut; cut ones that become whole, and whose states are sharded
        layout("save-vpp2-to-tp2", of="qwen2-one", tensor=2) | {"checkpoint": "save-vpp2"},
        layout("save-tp2-to-dp2", ranks=2) | {"checkpoint": "save-tp2"},
    ]
)
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "rank": ({"lora": LORA | {"rank": 8}}, ("learner.lora.rank", "expected 4", "found 8")),
    "alpha": ({"lora": {"rank": 4}}, ("learner.lora.alpha", "expected 6.0", "found 8")),
    "targets": ({"lora": ATTENTION}, ("learner.lora.targets", "linear_fc2")),
    "dropout": ({"lora": LORA | {"dropout": 0.5}}, ("learner.lora.dropout", "found 0.5")),
    "none": ({"lora": None}, ("learner.lora: ", "found unset", "checkpoint of adapters")),
    "base": ({"kind": "changed"}, ("model.path: ", "the adapters of")),
    "whole": ({"checkpoint": "whole"}, ("learner.lora: expected unset", "checkpoint of whole weights")),
}


def adapters(backend: Any, prefix: str) -> dict[str, Tensor]:
    with backend._whole():
        return {f"{prefix}.{name}": tensor.float().clone() for name, tensor in backend.adapters.tensors()}


def packed(named: Iterable[tuple[str, Tensor]]) -> tuple[Layout, Tensor]:
    """Tensors of an export in a flat buffer, as the weight plane has them."""
    copies = [(name, tensor.clone()) for name, tensor in named]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in copies]
    layout = Layout.of([(n, dtype, tuple(t.shape)) for (n, t), dtype in zip(copies, dtypes, strict=True)])
    return layout, flat_buffer.pack(copies, layout)


def delivered(backend: Any, start: Tensor) -> bool:
    """Whether a node gets the exported weights from the frozen ones and the adapters, all to the bit.

    The frozen ones are `start`, the weights before the first step.
    """
    layout, before = packed(backend.export_frozen())
    beside, found = packed(backend.export_adapters())
    config = backend.adapters.config
    merge_version(before, layout, found, AdapterLayout(beside, config.factor / config.rank), made := before.clone())
    return torch.equal(before, start) and torch.equal(made, packed(backend.export())[1])


def frozen(backend: Any) -> list[Tensor]:
    """Copies of what must not change: parameters that do not train, and buffers."""
    modules = [chunk.module for chunk in backend.chunks]
    kept = [p for module in modules for p in module.parameters() if not p.requires_grad]
    with backend._whole():
        return [tensor.detach().clone() for tensor in (*kept, *(b for module in modules for b in module.buffers()))]


def job_models(folder: Path, spec: dict[str, Any]) -> None:
    """The models, another one, and one that differs from `tied` in the last element of one matrix."""
    tiny_models.job_models(folder, spec)
    tiny_models.save(tiny_models.new_model("tied", seed=7), folder / "models" / "other")
    shutil.copytree(folder / "models" / "tied", folder / "models" / "changed")
    weights = load_file(folder / "models" / "tied" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][-1, -1] += 0.01
    save_file(weights, folder / "models" / "changed" / "model.safetensors", metadata={"format": "pt"})


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Steps from the adapters' start, then gradients, log-probabilities, the reference, and all exports."""
    backend = tiny_models.backend(folder, spec)
    before = frozen(backend)
    tensors = adapters(backend, "start") | exported(backend, "base")
    start = packed(backend.export())[1]
    steps = [figures(backend, number) for number in range(STEPS)]
    mine = share(backend, microbatches(0))
    with backend.offload.parameters(), backend.offload.gradients():
        backend.optimizer.zero_grad()
        backend.schedule.train(mine, policy_loss, TEMPERATURE, entropy=True)
        with tiny_models.gradients_in_place(backend):
            tensors |= adapters(backend, "gradient")
    tensors |= tiny_models.logprobs(backend) | adapters(backend, "trained") | exported(backend, "merged")
    everywhere = [replace(batch, loss_mask=torch.ones_like(batch.loss_mask)) for batch in mine]
    tensors |= numbered(backend, backend.reference_logprobs(everywhere, TEMPERATURE), "reference")
    tensors |= tiny_models.logprobs(backend, "afterwards")
    part = {name: tensor.clone() for name, tensor in backend.export_part()}
    tensors |= {f"part.{name}": tensor for name, tensor in part.items()}
    result: dict[str, Any] = {"steps": steps, "part": [[name, list(tensor.shape)] for name, tensor in part.items()]}
    result["layout"] = [[name, list(shape)] for name, shape in backend.part_layout()]
    result["delivered"] = delivered(backend, start)
    result["kept"] = all(torch.equal(a, b) for a, b in zip(before, frozen(backend), strict=True))
    result["stepped"] = sum(parameter.numel() for parameter, _ in tiny_models.main_parameters(backend))
    if spec["name"] == spec["of"]:
        backend.adapters.save(folder / "saved" / spec["name"], "the model")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_peft(folder: Path, spec: dict[str, Any]) -> None:
    """The same steps of Hugging Face's peft, and what it makes of the adapter that was saved after them."""
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

    of = spec["of"]
    kind, lora = REFERENCES[of]
    told = json.loads((folder / "saved" / of / "adapter_config.json").read_text())
    config = LoraConfig(r=lora["rank"], lora_alpha=lora["alpha"], target_modules=told["target_modules"])
    base = tiny_models.new_model(kind)
    model: Any = get_peft_model(base, config)
    start = Outcome(folder / of).section("start")
    said = set_peft_model_state_dict(model, start)
    assert not said.unexpected_keys and not [name for name in said.missing_keys if "lora_" in name]
    modules = dict(model.named_modules())
    for name, module in modules.items():
        last = name.rpartition(".")[2]
        if last in SHARED_A and hasattr(module, "lora_A"):
            module.lora_A["default"].weight = modules[name.removesuffix(last) + SHARED_A[last]].lora_A["default"].weight
    tiny_models.adamw_steps(model, STEPPED["lr"])

    def named(of: str, gradient: bool) -> dict[str, Tensor]:
        pairs = model.named_parameters(remove_duplicate=False)
        found = {name.replace(".default.", "."): p for name, p in pairs if "lora_" in name}
        return {f"{of}.{name}": (p.grad if gradient else p).detach().clone() for name, p in found.items()}

    tensors = named("trained", gradient=False)
    model.zero_grad()
    batches = microbatches(0)
    total = sum(batch.loss_mask.sum() for batch in batches)
    for i, batch in enumerate(batches):
        logprobs, entropy = tiny_models.hugging_face(model, batch)
        tensors[f"logprobs.{i}"] = logprobs.detach()
        (policy_loss(logprobs, entropy, batch).loss_sum / total).backward()
    tensors |= named("gradient", gradient=True)
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(tiny_models.new_model(kind), str(folder / "saved" / of)).eval()
        others = {"base": tiny_models.new_model(kind), "other": tiny_models.new_model(kind, seed=7), "loaded": loaded}
        for name, other in others.items():
            tensors |= {f"{name}.{i}": tiny_models.hugging_face(other, batch)[0] for i, batch in enumerate(batches)}
        whole = tiny_models.in_files(loaded.merge_and_unload())
    tensors |= {f"merged.{name}": tensor for name, tensor in whole.items()}
    forked_ranks.write(folder / f"peft-{of}", 0, tensors, {})


def job_save(folder: Path, spec: dict[str, Any]) -> None:
    """Some steps, a checkpoint, and the next step while it is written."""
    backend = tiny_models.backend(folder, spec)
    for number in range(SAVED_AT):
        figures(backend, number)
    tensors = tiny_models.logprobs(backend) | tiny_models.logprobs(backend, "again")
    path = folder / "checkpoints" / spec["name"]
    backend.start_checkpoint(path)
    result: dict[str, Any] = {"after": figures(backend, SAVED_AT)}
    backend.checkpoint_done(wait=True)
    result["bytes"] = sum(file.stat().st_size for file in path.glob("__*"))
    tensors |= exported(backend, "after") | adapters(backend, "trained")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_resume(folder: Path, spec: dict[str, Any]) -> None:
    backend = tiny_models.backend(folder, spec | {"seed": 99})  # other adapters, which the checkpoint replaces
    backend.load_checkpoint(folder / "checkpoints" / spec["checkpoint"])
    tensors = tiny_models.logprobs(backend)
    result = {"after": figures(backend, SAVED_AT)}
    tensors |= exported(backend, "after") | adapters(backend, "trained")
    forked_ranks.write(folder / spec["name"], backend.rank, tensors, result)


def job_refused(folder: Path, spec: dict[str, Any]) -> None:
    backend = tiny_models.backend(folder, spec)
    said = tiny_models.refusal(backend.load_checkpoint, folder / "checkpoints" / spec["checkpoint"])
    forked_ranks.write(folder / spec["name"], 0, {}, {"said": said})


def job_whole(folder: Path, spec: dict[str, Any]) -> None:
    """A checkpoint of a model that trains as a whole."""
    tiny_models.save_checkpoint(tiny_models.backend(folder, {}), folder / "checkpoints" / "whole")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    refused = [
        layout(f"refused-{name}") | {"checkpoint": "save-one"} | changed for name, (changed, _) in REFUSED.items()
    ]
    return forked_ranks.run(
        tmp_path_factory,
        group(job_models, [{"kinds": sorted({kind for kind, _ in REFERENCES.values()})}], shared=True),
        group(job_layout, ALONE, shared=True),
        group(job_peft, [{"name": f"peft-{name}", "of": name} for name in REFERENCES], shared=True),
        group(job_layout, [*CUT, BF16, REFERRED], shared=True),
        group(job_save, [*SAVE, *DROPPED], shared=True),
        group(job_whole, [{"name": "whole"}], shared=True),
        group(job_resume, SAME),  # in new processes, which have nothing but the checkpoint
        group(job_resume, OTHER, shared=True),
        group(job_refused, refused, shared=True),
    )


def found_and_peft(folder: Path, spec: dict[str, Any]) -> tuple[Outcome, Outcome]:
    return Outcome(folder / spec["name"]), Outcome(folder / f"peft-{spec['of']}")


@forked_ranks.named(LAYOUTS)
def test_adapters_start_alike_under_every_layout_and_change_nothing(folder: Path, spec: dict[str, Any]) -> None:
    found, one = Outcome(folder / spec["name"]), Outcome(folder / spec["of"])
    same(found.section("start"), one.section("start"))
    for name, tensor in found.section("start").items():
        assert (".lora_B." in name) == (not tensor.any()), name
    same(found.section("base"), load_file(folder / "models" / spec["kind"] / "model.safetensors"))


@forked_ranks.named(LAYOUTS)
def test_steps_gradients_and_logprobs_equal_those_of_peft(folder: Path, spec: dict[str, Any]) -> None:
    found, peft = found_and_peft(folder, spec)
    start = Outcome(folder / spec["of"]).section("start")
    tiny_models.check_update(start, found.section("trained"), peft.section("trained"))
    moved_alike(peft.section("base"), found.section("logprobs"), peft.section("logprobs"), atol=MOVED)
    assert worst(found.section("gradient"), peft.section("gradient"))[0] < min(2e-3 * LOOSE, 0.5)
    moved = max((found.section("logprobs")[i] - row).abs().max() for i, row in peft.section("base").items())
    assert moved > 0.1, "else nothing would be compared"


@forked_ranks.named(CUT)
def test_every_layout_has_the_losses_norms_and_gradients_of_one_rank(folder: Path, spec: dict[str, Any]) -> None:
    (found, peft), one = found_and_peft(folder, spec), Outcome(folder / spec["of"])
    for rank in found.ranks:
        for step, expected in zip(rank["steps"], one.ranks[0]["steps"], strict=True):
            assert step == pytest.approx(expected, rel=5e-5 * LOOSE)
    assert worst(found.section("gradient"), one.section("gradient"))[0] < min(1e-3 * LOOSE, 0.5)
    moved_alike(peft.section("base"), found.section("logprobs"), one.section("logprobs"), atol=MOVED)
    if spec["memory"] == OFFLOADED:
        moved_alike(one.section("start"), found.section("trained"), one.section("trained"))


@forked_ranks.named(LAYOUTS)
def test_only_adapters_train_and_the_reference_is_the_model_beneath(folder: Path, spec: dict[str, Any]) -> None:
    found, peft = found_and_peft(folder, spec)
    assert all(rank["kept"] for rank in found.ranks), "the frozen parameters, to the bit"
    if spec["name"] == spec["of"]:
        once = {n: t for n, t in found.section("start").items() if ".lora_B." in n or n.split(".")[-3] not in SHARED_A}
        assert found.ranks[0]["stepped"] == sum(tensor.numel() for tensor in once.values())
    same(found.section("reference"), peft.section("base"), atol=2e-5 * LOOSE)
    again(found.section("afterwards"), found.section("logprobs"))


def test_a_reference_of_its_own_has_no_adapters_and_leaves_the_policy_as_it_is(folder: Path) -> None:
    found, peft = found_and_peft(folder, REFERRED)
    same(found.section("reference"), peft.section("other"), atol=2e-5 * LOOSE)
    again(found.section("afterwards"), found.section("logprobs"))
    assert all(rank["kept"] for rank in found.ranks)


@forked_ranks.named(LAYOUTS)
def test_the_export_and_its_parts_are_the_weights_that_peft_merges(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    merged = Outcome(folder / f"peft-{spec['of']}").section("merged")
    if spec in CUT:
        moved_alike(found.section("base"), found.section("merged"), merged, atol=2e-4)
    else:  # they merge the same adapters
        same(found.section("merged"), merged, atol=1e-6 * LOOSE)
    parts = [name for rank in found.ranks for name, _ in rank["part"]]
    assert len(parts) == len(set(parts))
    same(found.section("part"), found.section("merged"))
    assert [rank["layout"] for rank in found.ranks] == [rank["part"] for rank in found.ranks]


@forked_ranks.named([*LAYOUTS, BF16])
def test_a_node_merges_the_exported_weights_to_the_bit(folder: Path, spec: dict[str, Any]) -> None:
    found = Outcome(folder / spec["name"])
    assert all(rank["delivered"] for rank in found.ranks)
    merged = found.section("merged")
    assert any(not torch.equal(merged[name], weight) for name, weight in found.section("base").items())


@pytest.mark.parametrize("name", REFERENCES)
def test_peft_loads_the_saved_adapter(folder: Path, name: str) -> None:
    assert {file.name for file in (folder / "saved" / name).iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    loaded = Outcome(folder / f"peft-{name}").section("loaded")
    same(loaded, Outcome(folder / name).section("logprobs"), atol=1e-5 * LOOSE)


def test_in_bfloat16_the_merged_weights_are_rounded_once(folder: Path) -> None:
    found, exact = Outcome(folder / "bf16"), Outcome(folder / "one")
    for step, expected in zip(found.ranks[0]["steps"], exact.ranks[0]["steps"], strict=True):
        assert step[0] == pytest.approx(expected[0], abs=0.1)
    trained, base, merged = (found.section(name) for name in ("trained", "base", "merged"))
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in trained:
            delta = trained[f"{module}.lora_B.weight"] @ trained[f"{module}.lora_A.weight"]
            expected = torch.add(weight.float(), delta, alpha=LORA["alpha"] / LORA["rank"]).bfloat16()
        torch.testing.assert_close(merged[name], expected, rtol=2**-7, atol=1e-6)


@forked_ranks.named(SAME)
def test_resuming_takes_bitwise_the_step_of_the_run_that_went_on(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    for mine, theirs in zip(came_back.ranks, went_on.ranks, strict=True):
        assert mine["after"] == approximately(theirs["after"])
    again(came_back.section("logprobs"), went_on.section("logprobs"))
    start = Outcome(folder / spec["of"])
    for before, section in (("base", "after"), ("start", "trained")):
        moved_alike(start.section(before), came_back.section(section), went_on.section(section))


@forked_ranks.named(OTHER)
def test_another_layout_goes_on_with_the_same_step(folder: Path, spec: dict[str, Any]) -> None:
    went_on, came_back = Outcome(folder / spec["checkpoint"]), Outcome(folder / spec["name"])
    assert came_back.ranks[0]["after"] == pytest.approx(went_on.ranks[0]["after"], rel=5e-5 * LOOSE)
    same(came_back.section("logprobs"), went_on.section("logprobs"), atol=2e-5)
    same(came_back.section("trained"), went_on.section("trained"), atol=1e-5)


def test_a_checkpoint_has_adapters_alone(folder: Path) -> None:
    found = Outcome(folder / "save-one")
    trained = {n: t for n, t in found.section("trained").items() if ".lora_B." in n or n.split(".")[-3] not in SHARED_A}
    needed = sum(tensor.numel() for tensor in trained.values()) * 4 * 4  # weights, main parameters and two states
    assert needed < found.ranks[0]["bytes"] < needed + 400_000  # about 2 kB for each of some 130 tensors


@forked_ranks.named(DROPPED)
def test_dropout_acts_in_training_only(folder: Path, spec: dict[str, Any]) -> None:
    found, without = Outcome(folder / spec["name"]), Outcome(folder / "save-one")
    again(found.section("again"), found.section("logprobs"))
    assert found.ranks[0]["after"] != without.ranks[0]["after"]
    assert worst(found.section("trained"), without.section("trained"))[0] > 1e-2


def test_recomputation_drops_the_same_places_again(folder: Path) -> None:
    plain, again = (Outcome(folder / spec["name"]) for spec in DROPPED)
    assert again.ranks[0]["after"] == pytest.approx(plain.ranks[0]["after"], rel=1e-4)
    assert worst(again.section("trained"), plain.section("trained"))[0] < 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_than_those_of_the_checkpoint_are_refused(folder: Path, name: str) -> None:
    said = Outcome(folder / f"refused-{name}").ranks[0]["said"]
    for fact in REFUSED[name][1]:
        assert fact in said, said
