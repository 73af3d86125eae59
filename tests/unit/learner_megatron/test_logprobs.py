"""Vocabulary-parallel log-probabilities against torch's log_softmax, in float64, on one and on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from learner.megatron.logprobs import logprobs_and_entropy, logprobs_of

ROOT = Path(__file__).resolve().parents[3]


def expected(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def example(tokens: int = 7, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(tokens, vocabulary, generator=random, dtype=torch.float64) * 3
    return logits, torch.randint(vocabulary, (tokens,), generator=random)


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_equal_log_softmax(chunk: int, temperature: float) -> None:
    logits, targets = example()
    logprobs, entropy = expected(logits, targets, temperature)
    found = logprobs_and_entropy(logits, targets, temperature, chunk_elements=chunk)
    torch.testing.assert_close(found[0], logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs_of(logits, targets, temperature, chunk_elements=chunk), logprobs)


@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
def test_gradients_pass_gradcheck(chunk: int) -> None:
    logits, targets = example()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: logprobs_and_entropy(x, targets, 0.6, None, chunk), (logits,))
    assert torch.autograd.gradcheck(lambda x: logprobs_of(x, targets, 0.6, None, chunk), (logits,))


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([0, 2]))
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -1.0986123]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986123]))


def test_bfloat16_logits_give_float32_results_and_bfloat16_gradients() -> None:
    logits, targets = example()
    rounded = logits.bfloat16().requires_grad_()
    found, entropy = logprobs_and_entropy(rounded, targets)
    (found.sum() + entropy.sum()).backward()
    assert (found.dtype, entropy.dtype, rounded.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    torch.testing.assert_close(found.double(), expected(rounded.detach().double(), targets, 1.0)[0], rtol=0, atol=1e-5)


def test_no_tokens_give_no_logprobs() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    found = logprobs_of(logits, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0,)
    assert logits.grad.shape == (0, 5)


_RANK = """
import sys, torch, torch.distributed as dist
from common.lifecycle import leave
from learner.megatron.logprobs import logprobs_and_entropy, logprobs_of
torch.set_num_threads(1)
rank, where = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{where}/store", rank=rank, world_size=2)
torch.manual_seed(4)
logits = (torch.randn(9, 14, dtype=torch.float64) * 3).requires_grad_()
targets, weights = torch.randint(14, (9,)), torch.randn(2, 9, dtype=torch.float64)
log_p = (logits / 0.6).log_softmax(-1)
wanted = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
(gradient,) = torch.autograd.grad((torch.stack(wanted) * weights).sum(), logits)
for chunk in (1, 40, 1 << 20):
    mine = logits.detach()[:, rank * 7 : rank * 7 + 7].clone().requires_grad_()
    found = logprobs_and_entropy(mine, targets, 0.6, dist.group.WORLD, chunk)
    (torch.stack(found) * weights).sum().backward()
    torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine.grad, gradient[:, rank * 7 : rank * 7 + 7], rtol=1e-11, atol=1e-12)
    alone = logprobs_of(mine.detach(), targets, 0.6, dist.group.WORLD, chunk)
    torch.testing.assert_close(alone, wanted[0], rtol=1e-12, atol=1e-12)
print("equal")
leave(0)  # as a rank ends: gloo's threads do not survive the interpreter's teardown
"""


def test_two_ranks_that_share_the_vocabulary_get_the_values_and_their_slices_of_the_gradient(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (out, err) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, err
        assert out.strip() == "equal"


def test_an_entropy_that_the_loss_does_not_use_has_no_part_in_the_gradient() -> None:
    """Of impossible tokens the entropy's gradient is not a number; what is not asked for must not be computed."""
    logits, targets = example()
    logits[:, 0] = -torch.inf
    targets = targets.clamp(min=1)
    inputs = [logits.clone().requires_grad_() for _ in range(2)]
    logprobs_and_entropy(inputs[0], targets)[0].sum().backward()
    logprobs_of(inputs[1], targets).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.isfinite(inputs[0].grad).all()


def test_the_entropy_alone_has_its_own_gradient() -> None:
    logits, targets = example()
    assert torch.autograd.gradcheck(lambda x: logprobs_and_entropy(x, targets)[1], (logits.requires_grad_(),))
