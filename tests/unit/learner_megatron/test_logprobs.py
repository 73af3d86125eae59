"""Vocabulary-parallel log-probabilities from hidden states against torch's log_softmax, in float64."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from common.process.lifecycle import leave
from learner.megatron.logprobs import logprobs_and_entropy
from tests.rigs import processes
from tests.rigs.waiting import LIMIT_S

CHUNKS = [1, 30, 1 << 20]  # a row at a time, some rows, everything at once


def logprobs_of(*inputs: Any, **options: Any) -> torch.Tensor:
    """The log-probabilities alone, without the cost of the entropies."""
    return logprobs_and_entropy(*inputs, **options, with_entropy=False)[0]


def expected(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.as_tensor(temperature, dtype=hidden.dtype).expand(len(hidden))
    log_p = (hidden @ weight.t() / rows[:, None]).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def example(tokens: int = 7, width: int = 3, vocabulary: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=random, dtype=torch.float64) * 2
    weight = torch.randn(vocabulary, width, generator=random, dtype=torch.float64)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=random)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_equal_log_softmax(chunk: int, temperature: float) -> None:
    hidden, weight, targets = example()
    logprobs, entropy = expected(hidden, weight, targets, temperature)
    found = logprobs_and_entropy(hidden, weight, targets, temperature, chunk_elements=chunk)
    torch.testing.assert_close(found[0], logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], entropy, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logprobs_of(hidden, weight, targets, temperature, chunk_elements=chunk), logprobs)


@pytest.mark.parametrize("kept", [0, 60, 1 << 20])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_token_has_its_own_temperature_in_values_and_gradients(chunk: int, kept: int) -> None:
    hidden, weight, targets = example()
    heat = torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3, 1.0, 0.6], dtype=torch.float64)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    weights = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(2, 7)
    for with_entropy in (True, False):
        found = logprobs_and_entropy(*inputs, targets, heat, None, chunk, kept, with_entropy)[: 1 + with_entropy]
        wanted = expected(*inputs, targets, heat)[: 1 + with_entropy]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-12, atol=1e-12)
        sums = [(torch.stack(each) * weights[: 1 + with_entropy]).sum() for each in (found, wanted)]
        for mine, reference in zip(*(torch.autograd.grad(each, inputs) for each in sums), strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 60, 1 << 20])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_gradients_pass_gradcheck(chunk: int, kept: int) -> None:
    hidden, weight, targets = example()
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    options = (targets, 0.6, None, chunk, kept)

    def check(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> bool:
        # gradcheck takes the backward pass twice; what was kept is used up by the first
        return torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)

    assert check(lambda h, w: logprobs_and_entropy(h, w, *options))
    assert check(lambda h, w: logprobs_and_entropy(h, w, *options)[1])
    assert check(lambda h, w: logprobs_and_entropy(h, w, *options)[0])
    assert check(lambda h, w: logprobs_of(h, w, *options))


@pytest.mark.parametrize("kept", [0, 60, 1 << 20])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_several_tokens_in_a_place_have_their_log_probabilities_and_gradients(chunk: int, kept: int) -> None:
    """Also a token that is asked for twice, as a teacher's may be the sampled one."""
    hidden, weight, targets = example()
    ids = torch.stack([targets, targets.roll(1), (targets + 3) % 11, targets], 1)
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    wanted = (hidden @ weight.t() / 0.6).log_softmax(-1).gather(1, ids)
    found, entropy = logprobs_and_entropy(*inputs, ids, 0.6, None, chunk, kept)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    factors = torch.linspace(-1, 2, ids.numel(), dtype=torch.float64).reshape(ids.shape)
    gradients = [torch.autograd.grad((x * factors).sum(), inputs) for x in (found, wanted)]
    for mine, autograd in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, autograd, rtol=1e-11, atol=1e-12)
    plain = [x.detach().clone().requires_grad_() for x in inputs]
    other = logprobs_and_entropy(*plain, targets, 0.6, None, chunk, kept)
    assert torch.equal(other[0], found[:, 0]) and torch.equal(other[1], entropy)
    both = logprobs_and_entropy(*inputs, ids, 0.6, None, chunk, kept)
    log_p = (inputs[0] @ inputs[1].t() / 0.6).log_softmax(-1)
    exact = (log_p.gather(1, ids) * factors).sum() - 0.3 * (log_p.exp() * log_p).sum()
    mixed = torch.autograd.grad((both[0] * factors).sum() + 0.3 * both[1].sum(), inputs)
    for mine, autograd in zip(mixed, torch.autograd.grad(exact, inputs), strict=True):
        torch.testing.assert_close(mine, autograd, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_what_is_kept_for_the_backward_pass_changes_nothing(chunk: int) -> None:
    found = []
    for kept in (0, 60, 1 << 20):
        hidden, weight, targets = example()
        inputs = (hidden * 30).requires_grad_(), weight.requires_grad_()  # far apart: some exponentials underflow
        values = logprobs_of(*inputs, targets, 0.6, None, chunk, kept)
        found.append([values.detach(), *torch.autograd.grad((values * values).sum(), inputs)])
    for other in found[1:]:
        for mine, reference in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(("trained", "fixed"), [(0, 1), (1, 0)])
def test_each_input_may_be_frozen(chunk: int, trained: int, fixed: int) -> None:
    *inputs, targets = example()
    inputs[trained].requires_grad_()
    logprobs_of(*inputs, targets, 0.6, None, chunk).sum().backward()
    assert inputs[fixed].grad is None
    (wanted,) = torch.autograd.grad(expected(*inputs, targets, 0.6)[0].sum(), inputs[trained])
    torch.testing.assert_close(inputs[trained].grad, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_weights_that_are_used_twice_as_tied_embeddings_are_get_both_gradients(chunk: int) -> None:
    _, weight, targets = example()
    weight.requires_grad_()

    def both(find: object) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(targets.flip(0), weight).tanh()
        (gradient,) = torch.autograd.grad(find(hidden).sum(), weight)
        return gradient

    wanted = both(lambda hidden: expected(hidden, weight, targets, 0.6)[0])
    found = both(lambda hidden: logprobs_of(hidden, weight, targets, 0.6, None, chunk))
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]])
    logprobs, entropy = logprobs_and_entropy(hidden, torch.eye(3), torch.tensor([0, 2]))
    torch.testing.assert_close(logprobs, torch.tensor([0.0, -1.0986123]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986123]))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_bfloat16_gives_float32_results_and_gradients_that_are_summed_in_float32(chunk: int) -> None:
    hidden, weight, targets = (x.repeat(40, 1) if x.dim() == 2 and len(x) == 7 else x for x in example())
    targets = targets.repeat(40)
    inputs = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    found, entropy = logprobs_and_entropy(*inputs, targets, 1.0, None, chunk)
    assert (found.dtype, entropy.dtype) == (torch.float32, torch.float32)
    (found.sum() + entropy.sum()).backward()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = expected(*exact, targets, 1.0)
    torch.testing.assert_close(found.double(), wanted[0], rtol=0, atol=0.03)  # logits are rounded to bfloat16
    (wanted[0].sum() + wanted[1].sum()).backward()
    for rounded, reference in zip(inputs, exact, strict=True):
        assert rounded.grad.dtype == torch.bfloat16
        assert (rounded.grad.double() - reference.grad).norm() < 0.02 * reference.grad.norm()


def test_no_tokens_give_no_logprobs() -> None:
    hidden, weight = torch.zeros(0, 2, requires_grad=True), torch.ones(5, 2, requires_grad=True)
    found = logprobs_of(hidden, weight, torch.zeros(0, dtype=torch.int64))
    found.sum().backward()
    assert found.shape == (0,)
    assert hidden.grad.shape == (0, 2)
    assert torch.equal(weight.grad, torch.zeros(5, 2))


def share_the_vocabulary(rank: int, folder: str, pipe: Connection) -> None:
    """A rank with half of the vocabulary: values, and its parts of the gradients, against those of the whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(4)
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(14, 5, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.randint(14, (9,)), torch.randn(2, 9, dtype=torch.float64)
    wanted = expected(hidden, weight, targets, 0.6)
    gradients = torch.autograd.grad((torch.stack(wanted) * weights).sum(), (hidden, weight))
    part = slice(rank * 7, rank * 7 + 7)
    for chunk in (1, 40, 1 << 20):
        mine = [x.detach().clone().requires_grad_() for x in (hidden, weight[part])]
        found = logprobs_and_entropy(*mine, targets, 0.6, dist.group.WORLD, chunk)
        (torch.stack(found) * weights).sum().backward()
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine[1].grad, gradients[1][part], rtol=1e-11, atol=1e-12)
        dist.all_reduce(mine[0].grad)
        torch.testing.assert_close(mine[0].grad, gradients[0], rtol=1e-11, atol=1e-12)
        ids = torch.stack([targets, (targets + 1) % 14, (targets * 5) % 14], 1)
        whole = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        log_p = (whole[0] @ whole[1].t() / 0.6).log_softmax(-1).gather(1, ids)
        (log_p * weights[0][:, None]).sum().backward()
        mine = [x.detach().clone().requires_grad_() for x in (hidden, weight[part])]
        several = logprobs_and_entropy(*mine, ids, 0.6, dist.group.WORLD, chunk)[0]
        (several * weights[0][:, None]).sum().backward()
        torch.testing.assert_close(several, log_p, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine[1].grad, whole[1].grad[part], rtol=1e-11, atol=1e-12)
        dist.all_reduce(mine[0].grad)
        torch.testing.assert_close(mine[0].grad, whole[0].grad, rtol=1e-11, atol=1e-12)
        with torch.no_grad():
            alone = logprobs_of(*mine, targets, 0.6, dist.group.WORLD, chunk)
        torch.testing.assert_close(alone, wanted[0], rtol=1e-12, atol=1e-12)
        inputs = [x.detach().clone().requires_grad_() for x in (hidden[:0], weight[part])]
        nothing = logprobs_and_entropy(*inputs, targets[:0], 0.6, dist.group.WORLD, chunk)
        torch.stack(nothing).sum().backward()
        assert nothing[0].shape == nothing[1].shape == (0,) and not inputs[1].grad.any()
    pipe.send_bytes(b"equal")
    leave(0)  # as a rank ends: gloo's threads do not survive the interpreter's teardown


def test_two_ranks_that_share_the_vocabulary_get_the_values_and_their_parts_of_the_gradients(tmp_path: Path) -> None:
    pipes = [processes.context().Pipe(duplex=False) for _ in range(2)]
    ranks = [processes.start(share_the_vocabulary, rank, str(tmp_path), pipes[rank][1]) for rank in range(2)]
    for (ours, theirs), rank in zip(pipes, ranks, strict=True):
        theirs.close()
        assert ours.poll(LIMIT_S) and ours.recv_bytes() == b"equal"
        rank.join(LIMIT_S)
        assert rank.exitcode == 0


@pytest.mark.parametrize("chunk", CHUNKS)
def test_an_entropy_that_the_loss_does_not_use_has_no_part_in_the_gradient(chunk: int) -> None:
    """The entropy's gradient at impossible tokens is not a number, so it must not be computed unasked."""
    hidden, weight, targets = example()
    hidden = torch.cat([hidden, torch.full((7, 1), 1e200, dtype=torch.float64)], 1)
    weight = torch.cat([weight, torch.zeros(11, 1, dtype=torch.float64)], 1)
    weight[0, -1] = -1e200  # the logit of token 0 is -inf
    targets = targets.clamp(min=1)
    inputs = [hidden.clone().requires_grad_() for _ in range(2)]
    logprobs_and_entropy(inputs[0], weight, targets, 1.0, None, chunk)[0].sum().backward()
    logprobs_of(inputs[1], weight, targets, 1.0, None, chunk).sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.isfinite(inputs[0].grad).all()


def test_no_tensor_is_as_large_as_all_logits() -> None:
    """Every allocation of the forward and backward pass is counted."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in [result] if isinstance(x, torch.Tensor))
            return result

    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    with Watch():
        logprobs, entropy = logprobs_and_entropy(hidden, weight, torch.zeros(64, dtype=torch.int64), 1.0, None, 4000)
        (logprobs.sum() + entropy.sum()).backward()
    assert max(sizes) == 4000  # a chunk of logits, and the gradient of the weights; all logits are 32,000
