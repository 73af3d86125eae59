"""The policy losses through real Megatron, under several layouts, against transformers and one microbatch of all.

Sequence ratios, masks, temperatures of tokens, denominators that are not loss tokens and histograms must not depend on
who computed what.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config.loss_keys import DistillationConfig, LossConfig
from learner.backend_protocol import Microbatch
from learner.certificate.batch import given
from learner.loss.losses import policy_loss
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.device import LOOSE
from tests.rigs.forked_ranks import Outcome, group, worst
from tests.rigs.tiny_models import TEMPERATURE, microbatches, share

MAX_TOKENS = 30
TOP_K = 5
LOSSES = {
    "gspo": LossConfig(
        **dict(objective="gspo", proximal="loglinear", reduction="sequence_mean"),
        **dict(correction="mis", correction_level="geometric", correction_low=0.8, correction_cap=1.2),
    ),
    "cispo": LossConfig(
        objective="cispo", proximal="behavior", correction="none", reduction="fixed_length", entropy_coefficient=0.05
    ),
    "ppo_clip": LossConfig(
        **dict(correction="icepop", correction_level="sequence", correction_low=0.6, correction_cap=1.6),
        **dict(correction_normalize=True, correction_veto=0.45, kl_coefficient=0.1),
    ),
    "dppo_tv": LossConfig(
        **dict(objective="dppo_tv", clip_low=5e-4, clip_high=5e-4, proximal="loglinear", reduction="sequence_mean"),
        **dict(correction_normalize=True, entropy_coefficient=0.01, kl_coefficient=0.1, kl_estimator="k2"),
    ),
    "gmpo": LossConfig(
        **dict(objective="gmpo", proximal="loglinear", reduction="sequence_mean", clip_low=0.1, clip_high=0.1),
        **dict(correction="tis", correction_cap=1.5, log_ratio_penalty=0.05),
    ),
    "clip_cov": LossConfig(objective="clip_cov", proximal="behavior", correction="none", clip_low=0.2, clip_high=0.2),
    "plug-ins": LossConfig(
        **dict(objective="examples.loss_parts:topr", correction="examples.loss_parts:v_trace", kl_coefficient=0.1),
        **dict(reduction="examples.loss_parts:root_of_length", kl_estimator="examples.loss_parts:both_ways"),
    ),
    "reverse_kl": LossConfig(
        proximal="loglinear", distillation=DistillationConfig(teacher="t", coefficient=0.3, alone=True)
    ),
    "forward_kl": LossConfig(
        **dict(reduction="sequence_mean", correction_normalize=True, entropy_coefficient=0.02),
        distillation=DistillationConfig(teacher="t", objective="forward_kl", top_k=TOP_K, coefficient=0.7),
    ),
}


KIND = "tied-deep"  # the sums of fewer layers cancel: the loss of `dppo_tv` would be a difference of larger figures
SPECS = forked_ranks.tried(
    [
        {"kind": KIND, "name": "one"},
        {"kind": KIND, "name": "dp2", "ranks": 2},
        {"kind": KIND, "name": "tp2", "parallel": {"tensor": 2}},
        {"kind": KIND, "name": "cp2", "parallel": {"context": 2}},
        # a filler joins the last round
        {"kind": KIND, "name": "vpp2", "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "uneven": True},
    ]
)


def job_reference(folder: Path, spec: dict[str, Any]) -> None:
    """transformers, one document after the other, and all of them in one microbatch: nothing is divided."""
    model = tiny_models.save(tiny_models.new_model(KIND), folder / "models" / KIND)
    random = torch.Generator().manual_seed(5)
    packs = microbatches(0)
    count = sum(len(pack.tokens) for pack in packs)
    heat = {"temperatures": torch.tensor([0.0, 0.5, 1.3])[torch.randint(0, 3, (count,), generator=random)]}
    packs = given(packs, heat)
    log_p = torch.cat([tiny_models.distributions(model, pack) for pack in packs])
    rows = [tiny_models.hugging_face(model, pack) for pack in packs]
    logprobs, entropy = torch.cat([x for x, _ in rows]), torch.cat([h for _, h in rows])
    names = ("behavior_logprobs", "reference_logprobs")
    data = heat | {name: logprobs.detach() + 0.3 * torch.randn(len(logprobs), generator=random) for name in names}
    data["staleness"] = torch.randint(0, 12, (len(logprobs),), generator=random, dtype=torch.int32)
    lengths = [n for pack in packs for n in pack.document_lengths]
    data["advantages"] = torch.randn(len(lengths), generator=random).repeat_interleave(torch.tensor(lengths))
    teacher = (log_p.detach() + 0.5 * torch.randn(log_p.shape, generator=random)).log_softmax(-1)
    top, ids = teacher.topk(TOP_K, -1)
    targets = torch.cat([pack.targets for pack in packs])
    data["teacher_logprobs"] = teacher.gather(1, targets[:, None])[:, 0]
    data |= {"teacher_top_ids": ids, "teacher_top_logprobs": top}
    data["marked"] = torch.rand(count, generator=random) < 0.2
    save_file(data, folder / "data.safetensors")
    batch = replace(whole(given(packs, data)), top_logprobs=log_p.gather(1, ids))
    for name, config in LOSSES.items():
        out = policy_loss(config, MAX_TOKENS)(logprobs, entropy, batch)
        loss = out.loss_sum / out.denominator
        model.zero_grad()
        loss.backward(retain_graph=True)
        found = {f"gradient.{n}": p.grad.clone() for n, p in model.named_parameters()}
        forked_ranks.write(folder / "reference" / name, 0, found, {"loss": loss.item(), **figures(out)})


def job_layout(folder: Path, spec: dict[str, Any]) -> None:
    """Every loss under one layout."""
    backend = tiny_models.backend(folder, spec)
    packs = given(microbatches(0), load_file(folder / "data.safetensors"))
    if spec.get("uneven"):
        packs = [*packs[:2], whole(packs[2:])]
    mine = share(backend, packs)
    for name, config in LOSSES.items():
        backend.optimizer.zero_grad()
        totals = backend.schedule.train(mine, policy_loss(config, MAX_TOKENS), TEMPERATURE, entropy=True)
        found = {f"gradient.{n}": x for n, x in tiny_models.gradients(backend).items()}
        figures = dict(sums=totals.sums, maxima=totals.maxima)
        result = {"loss": totals.loss, "tokens": totals.loss_tokens, **figures}
        forked_ranks.write(folder / spec["name"] / name, backend.rank, found, result)


def job_spoiled(folder: Path, spec: dict[str, Any]) -> None:
    """The message of a step whose log-probabilities are gone."""
    backend = tiny_models.backend(folder, spec)
    loss = policy_loss(LossConfig(), MAX_TOKENS)
    packs = given(microbatches(0), load_file(folder / "data.safetensors"))
    spoiled = lambda logprobs, entropy, batch: loss(logprobs * float("nan"), entropy, batch)  # noqa: E731
    said = tiny_models.refusal(backend.train_step, packs, spoiled)
    forked_ranks.write(folder / spec["name"], backend.rank, {}, {"said": said})


def whole(packs: list[Microbatch]) -> Microbatch:
    names = (
        "tokens",
        "targets",
        "positions",
        "loss_mask",
        "advantages",
        "behavior_logprobs",
        "staleness",
        "temperatures",
        "marked",
    )
    names += ("reference_logprobs", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
    tensors = {name: torch.cat([getattr(pack, name) for pack in packs]) for name in names}
    return Microbatch(document_lengths=sum((pack.document_lengths for pack in packs), ()), **tensors)


def figures(out: Any) -> dict[str, Any]:
    return {part: {n: x.tolist() for n, x in getattr(out, part).items()} for part in ("sums", "maxima")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forked_ranks.run(
        tmp_path_factory,
        group(job_reference, [{}], shared=True),
        group(job_layout, SPECS, shared=True),
        group(job_spoiled, [{"kind": KIND, "name": "spoiled"}], shared=True),
    )


@pytest.mark.parametrize("layout", [spec["name"] for spec in SPECS])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_gradient_and_every_ranks_figures_are_those_of_the_global_batch(
    folder: Path, layout: str, loss: str
) -> None:
    found, reference = Outcome(folder / layout / loss), Outcome(folder / "reference" / loss)
    assert worst(found.section("gradient"), reference.section("gradient")) < (1e-5 * LOOSE, "")
    expected: dict[str, Any] = reference.ranks[0]
    assert len(found.ranks) == (1 if layout == "one" else 2)
    for rank in found.ranks:
        # A mean over log-probabilities of some nats may be small itself.
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5 * LOOSE, abs=2e-6 * LOOSE)
        assert rank["maxima"] == pytest.approx(expected["maxima"], rel=1e-5 * LOOSE)
        assert rank["sums"].keys() == expected["sums"].keys()
        for name, wanted in expected["sums"].items():
            values, sums = (torch.tensor(x, dtype=torch.float64).reshape(-1) for x in (rank["sums"][name], wanted))
            edge = 2 if name == "ratio_bins" else 0  # a token at the edge of a bin
            assert (values - sums).abs().sum() <= 1e-5 * LOOSE * sums.abs().sum() + edge, name
            assert values.sum().item() == pytest.approx(sums.sum().item(), rel=1e-5 * LOOSE)


def test_the_losses_make_use_of_their_masks_and_bounds(folder: Path) -> None:
    """Else the comparisons above would prove little."""
    sums = {loss: Outcome(folder / "reference" / loss).ranks[0]["sums"] for loss in LOSSES}
    tokens = Outcome(folder / "one" / "gspo").ranks[0]["tokens"]
    assert 0 < sums["gspo"]["correction_masked"] < tokens
    assert sums["gspo"]["objective_clipped"] > 0
    assert 0 < sums["gmpo"]["objective_clipped"] < tokens
    assert 0 < sums["clip_cov"]["objective_clipped"] < tokens
    assert 0 < sums["plug-ins"]["correction_clipped"] < tokens
    assert 0 < sums["ppo_clip"]["correction_masked"] < tokens
    assert 0 < sums["ppo_clip"]["vetoed"] < tokens
    assert 0 < sums["dppo_tv"]["objective_clipped"] < tokens
    assert sums["dppo_tv"]["weight"] != pytest.approx(tokens, rel=1e-3)
    assert 0 < sums["forward_kl"]["teacher_tail"] < tokens
    assert sums["forward_kl"]["teacher_kl"] != 0


def test_a_step_whose_log_probabilities_are_gone_says_so(folder: Path) -> None:
    said = Outcome(folder / "spoiled").ranks[0]["said"]
    assert " nan " in said and "step 0" in said
