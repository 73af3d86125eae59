"""The parts that need Megatron but no world of ranks; see test_megatron_process.py."""

# ruff: noqa: E402
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from learner.megatron.cpu import compat

compat.enable()

import megatron.core.parallel_state as mpu
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from transformers import Qwen3Config

from common.config.converted import Forward
from common.config.loss_keys import LossConfig
from common.config.schema import LearnerConfig, ModelConfig, OptimizerConfig, ParallelConfig
from common.errors import SlipstreamError, UsageError
from learner.backend_protocol import Microbatch
from learner.batch.packing import Document, build
from learner.loop.transcripts import RecordingLoss
from learner.loss.losses import policy_loss
from learner.megatron import checkpoint, memory, parallel
from learner.megatron.backend import MegatronBackend
from learner.megatron.conversion import bridge_fixes, model, verify
from learner.megatron.cpu.layers import SDPACoreAttention
from learner.megatron.moe import Experts
from learner.megatron.optimizer import learning_rate
from learner.megatron.schedule import filler
from tests.rigs.refusals import refused

LENGTHS = (5, 40, 1, 17, 16, 33, 2)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        (dict(lr=1.0, warmup_steps=4), 10, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (dict(lr=2.0, schedule="linear", min_lr_fraction=0.5), 4, [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        (
            dict(lr=1.0, schedule="cosine", warmup_steps=2, decay_steps=6),
            100,
            [0.5, 1.0, 1.0, 0.8535533906, 0.5, 0.1464466094, 0.0, 0.0],
        ),
    ],
    ids=["warms up and stays", "linear to its floor", "cosine after the warmup"],
)
def test_the_rate_follows_its_schedule(options: dict[str, Any], steps: int, expected: list[float]) -> None:
    rates = [learning_rate(step, OptimizerConfig(**options), steps) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


def _attention(window: tuple[int, int] | None) -> SDPACoreAttention:
    config = SimpleNamespace(
        attention_dropout=0.0,
        softmax_type="vanilla",
        apply_query_key_layer_scaling=False,
        context_parallel_size=1,
        window_size=window,
        window_attn_skip_freq=None,
    )
    alone = ProcessGroupCollection(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self", k_channels=8, pg_collection=alone)


def _by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int) -> torch.Tensor:
    """One document after the other, from the definition."""
    rows, at = [], 0
    for n in LENGTHS:
        a, b, c = q[at : at + n], *(x[at : at + n].repeat_interleave(2, 1) for x in (k, v))
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        scores = torch.einsum("ind,jnd->nij", a, b) / 8**0.5
        weights = scores.masked_fill((j > i) | (j < i - left), float("-inf")).softmax(-1)
        rows.append(torch.einsum("nij,jnd->ind", weights, c).flatten(1))
        at += n
    return torch.cat(rows)


def _pack() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PackedSeqParams]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return q, k, v, PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)


@pytest.mark.parametrize("window", [None, (3, 0)])
def test_packed_documents_attend_as_they_would_alone(window: tuple[int, int] | None) -> None:
    q, k, v, packed = _pack()
    found = _attention(window)(q, k, v, None, packed_seq_params=packed)
    wanted = _by_hand(q, k, v, window[0] if window else 1000)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((output * direction).sum(), (q, k, v)) for output in (found, wanted)]
    for mine, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


def test_bounds_that_do_not_cover_the_pack_are_refused() -> None:
    q, k, v, packed = _pack()
    with refused(ValueError, 114, 113):
        _attention(None)(q[:-1], k[:-1], v[:-1], None, packed_seq_params=packed)


def _rotary(rope: dict[str, Any], base: float) -> tuple[Qwen3Config, torch.nn.Module]:
    """A configuration, and a Megatron chunk whose frequencies have that base."""
    config = Qwen3Config(head_dim=16, rope_parameters=rope)
    config.architectures = ["Qwen3ForCausalLM"]
    model = torch.nn.Module()
    model.rotary_pos_emb = torch.nn.Module()
    model.rotary_pos_emb.inv_freq = 1.0 / base ** (torch.arange(0, 16, 2) / 16)
    return config, model


def test_wrong_rotary_frequencies_are_replaced_by_hugging_faces() -> None:
    config, model = _rotary({"rope_theta": 1e6, "rope_type": "default"}, base=1e4)
    bridge_fixes.check_rope(config, model)
    torch.testing.assert_close(model.rotary_pos_emb.inv_freq, 1.0 / 1e6 ** (torch.arange(0, 16, 2) / 16))


def test_a_rotary_embedding_that_megatron_cannot_be_given_is_refused() -> None:
    yarn = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    with refused(UsageError, "'yarn'"):
        bridge_fixes.check_rope(*_rotary(yarn, base=1e6))


def test_experts_without_a_name_of_their_own_are_not_exported_apart() -> None:
    ours, name = SimpleNamespace(ep_size=2), "model.layers.0.mlp.experts.down_proj"
    theirs = MegatronParamMapping.gather_from_ep_ranks
    with refused(SlipstreamError, name), bridge_fixes.within_the_part():
        MegatronParamMapping.gather_from_ep_ranks(ours, torch.zeros(2, 2), None, name)
    assert MegatronParamMapping.gather_from_ep_ranks is theirs


def test_a_world_that_the_layout_does_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    learner = LearnerConfig(parallel=ParallelConfig(tensor=2))
    with refused(UsageError, "learner.world_size", "multiple of 2", "found 3"):
        MegatronBackend(ModelConfig(path="models/none"), learner, total_steps=1)


def test_torch_is_left_alone_and_megatron_sees_its_own_view() -> None:
    compat.enable()  # a second call does nothing
    assert torch is sys.modules["torch"]
    assert mpu.torch is not torch
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert "transformer_engine" not in sys.modules


def test_another_version_of_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.VERIFIED, "megatron-core", "0.15.0")
    with refused(UsageError, "megatron-core 0.15.0", "0.16.1"):
        compat.check_versions()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device's door: torch says that there is CUDA, and the list gets what is asked of the device."""
    asked: list[str] = []
    answers = {"set_device": None, "synchronize": None, "empty_cache": None, "get_rng_state": torch.zeros(3)}

    def answered(name: str, answer: Any, *args: object) -> Any:
        asked.append(" ".join([name, *map(str, args)]))
        return answer

    for name, answer in answers.items():
        monkeypatch.setattr(
            torch.cuda, name, lambda *args, n=name, a=answer: asked.append(" ".join([n, *map(str, args)])) or a
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return asked


def test_with_cuda_a_rank_joins_over_nccl_on_its_own_device(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "3")

    def joins(backend: str, **_: Any) -> None:
        raise SlipstreamError(f"{backend}, {parallel.device()}")

    monkeypatch.setattr(parallel.dist, "init_process_group", joins)
    with refused(SlipstreamError, "nccl, cuda:3"):
        parallel.initialize(ParallelConfig(), 1, 10.0)
    assert cuda == ["set_device cuda:3"]


@pytest.mark.parametrize(("engine", "apex"), [(True, True), (True, False), (False, True)])
def test_with_cuda_weights_are_made_there_and_kernels_are_fused_only_by_those_who_have_them(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch, engine: bool, apex: bool
) -> None:
    """DeepSeek's bridge asks for Apex's, and without it Megatron could not build the output layer."""
    monkeypatch.setattr(compat, "find_spec", lambda name: object() if engine else None)
    monkeypatch.setattr(model, "find_spec", lambda name: object() if apex else None)
    provider = SimpleNamespace(apply_rope_fusion=True, gradient_accumulation_fusion=True, transformer_layer_spec=None)
    model._configure(provider, torch.bfloat16, ParallelConfig(), "none")
    assert (provider.use_cpu_initialization, provider.bf16) == (False, True)
    assert (provider.apply_rope_fusion, provider.gradient_accumulation_fusion) == (engine, engine and apex)


def test_with_cuda_a_checkpoint_has_the_devices_generator(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("get_rank", "get_world_size"):
        monkeypatch.setattr(checkpoint.dist, name, lambda: 1)
    assert checkpoint._random_state().data["cuda"].tolist() == [0, 0, 0]


def test_with_cuda_offloaded_memory_is_given_back_and_swaps_end_before_they_return(cuda: list[str]) -> None:
    ours, theirs = torch.zeros(4), torch.ones(4)
    memory._exchange([ours], [theirs])
    assert (ours.sum(), theirs.sum(), cuda) == (4, 0, ["synchronize"])


def test_with_cuda_the_forward_check_allows_for_tf32(cuda: list[str]) -> None:
    told = Forward([0.0] * 4, rounding=0.25)
    assert verify._limit(told, torch.float32) == verify.FLOOR_CUDA
    assert verify._limit(told, torch.bfloat16) == verify.FLOOR_CUDA + verify.ROUNDING * 0.25


@pytest.mark.parametrize("reference", [None, torch.zeros(3)])
def test_a_filler_of_the_last_round_has_the_same_sums_as_the_other_microbatches(reference: torch.Tensor | None) -> None:
    """They are added up entry by entry."""
    ids, zeros = torch.ones(3, dtype=torch.int64), torch.zeros(3)
    real = Microbatch(ids, ids, torch.arange(3), (3,), torch.ones(3), zeros, zeros, zeros.int(), reference)
    outputs = [policy_loss(LossConfig(), 8)(zeros[: len(batch.targets)], None, batch) for batch in (real, filler(real))]
    first, last = ({name: value.shape for name, value in (out.sums | out.maxima).items()} for out in outputs)
    assert list(first.items()) == list(last.items())
    assert ("kl" in first) == (reference is not None)
    assert outputs[1].loss_sum == 0


def test_the_scale_of_the_balancing_loss_leaves_no_log_probabilities_for_transcripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are zeros, and the largest of all ranks counts: a pipeline's first stage would hide those of the last."""
    monkeypatch.setattr(mpu, "get_data_parallel_group", lambda: SimpleNamespace(size=lambda: 1))
    mask = np.array([0, 1, 1], np.uint8)
    document = Document(np.zeros(3, np.int32), mask, np.zeros(3, np.float32), np.zeros(3, np.int32), serial=1, sample=0)
    recorder = RecordingLoss(policy_loss(LossConfig(), 8))
    recorder.watch([document], {(1, 0)})
    assert Experts._balance_scale(cast(Any, None), build([document], [[0]]), recorder) == 1
    assert recorder.collect(cast(Any, SimpleNamespace(largest=lambda values: values))) == {}
