"""The packed documents on which a certificate is proven, with all that the job's loss and routers ask for."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from common.config.loss import MARKING
from common.config.schema import BaseConfig
from learner.backend_protocol import LossFunction, Microbatch
from learner.loss.losses import cross_entropy, policy_loss
from learner.loss.value_loss import value_loss

LENGTHS = ((40, 3, 17), (1, 33, 16, 5), (29,), (8, 8, 31, 12, 2))  # places of the documents of each pack
SEED = 100
NOISE = 0.3  # nats between the policies that sampled, train and refer; between a critic's values, too
TEMPERATURES = (0.0, 0.5, 1.3)  # 0: the job's
MARKED = UNROUTED = 0.2  # shares of the tokens


def packs(seed: int, vocabulary: int) -> list[Microbatch]:
    """Four packs of documents between 1 and 40 tokens; never token 0, whose gradient Hugging Face zeroes as padding."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for lengths in LENGTHS:
        total = sum(lengths)
        documents = [torch.randint(3, vocabulary, (n + 1,), generator=random) for n in lengths]
        made.append(
            Microbatch(
                tokens=torch.cat([d[:-1] for d in documents]),
                targets=torch.cat([d[1:] for d in documents]),
                positions=torch.cat([torch.arange(n) for n in lengths]),
                document_lengths=lengths,
                loss_mask=(torch.rand(total, generator=random) > 0.3).float(),
                advantages=torch.randn(total, generator=random),
                behavior_logprobs=torch.zeros(total),
            )
        )
    return made


def given(batches: Sequence[Microbatch], columns: dict[str, Tensor]) -> list[Microbatch]:
    """The packs with further columns, whose [T, ...] rows are those of all packs together."""
    if not columns:
        return [*batches]
    sizes = [len(pack.tokens) for pack in batches]
    rows = zip(*(column.split(sizes) for column in columns.values()), strict=True)
    return [replace(pack, **dict(zip(columns, part, strict=True))) for pack, part in zip(batches, rows, strict=True)]


def temperatures(config: BaseConfig) -> dict[str, Tensor]:
    """The column of the tokens' own temperatures; an agent names them, except beside a teacher, which knows none."""
    if config.rl is None or config.rl.learner.loss.distillation is not None:
        return {}
    random = torch.Generator().manual_seed(6)
    drawn = torch.randint(0, len(TEMPERATURES), (sum(map(sum, LENGTHS)),), generator=random)
    return {"temperatures": torch.tensor(TEMPERATURES)[drawn]}


def columns(
    config: BaseConfig, distributions: Tensor, routing: tuple[int, int, int] | None, values: Tensor | None = None
) -> dict[str, Tensor]:
    """[T, ...] columns of all packs: log-probabilities of other policies, advantages, ages, experts, other values.

    `distributions`: [T, vocabulary] log-probabilities of the policy, at each token's temperature. `routing`: (MoE
    layers, experts, experts per token) of a model with experts. `values`: [T] by the job's critic. The same each time.
    Documents belong to the job's sources in turn.
    """
    batches = packs(SEED, distributions.shape[1])
    random = torch.Generator().manual_seed(5)
    count = len(distributions)
    targets = torch.cat([pack.targets for pack in batches])[:, None]
    logprobs = distributions.gather(1, targets).squeeze(1)
    found: dict[str, Tensor] = {}
    if (job := config.rl) is None:
        return found

    def near(scale: float = NOISE) -> Tensor:
        return logprobs + scale * torch.randn(count, generator=random)

    lengths = torch.tensor([n for pack in batches for n in pack.document_lengths])
    found["behavior_logprobs"] = near()
    found["staleness"] = torch.randint(0, 12, (count,), generator=random, dtype=torch.int32)
    found["advantages"] = torch.randn(len(lengths), generator=random).repeat_interleave(lengths)
    loss = job.learner.loss
    if job.learner.updates > 1:
        found["proximal_logprobs"] = near(NOISE / 2)
    if job.measures_kl:
        found["reference_logprobs"] = near()
    if job.tasks.sources:
        own = torch.tensor([source.learner.loss.kl_coefficient for source in job.sources.values()])
        found["kl_coefficients"] = own[torch.arange(len(lengths)) % len(own)].repeat_interleave(lengths)
    if loss.objective in MARKING:
        found["marked"] = torch.rand(count, generator=random) < MARKED
    if loss.distillation is not None:
        teacher = (distributions + NOISE * torch.randn(distributions.shape, generator=random)).log_softmax(-1)
        found["teacher_logprobs"] = teacher.gather(1, targets).squeeze(1)
        if loss.distillation.wanted:
            found["teacher_top_logprobs"], found["teacher_top_ids"] = teacher.topk(loss.distillation.wanted, -1)
    if routing is not None and job.learner.moe.replay_routing:
        layers, experts, chosen = routing
        drawn = torch.rand((count, layers, experts), generator=random).argsort(-1)[..., :chosen].to(torch.int16)
        unknown = torch.rand(count, generator=random) < UNROUTED
        found["routed_experts"] = drawn.masked_fill(unknown[:, None, None], -1)
    if values is not None:
        found["values"], found["returns"] = (
            values + scale * torch.randn(count, generator=random) for scale in (NOISE, 1.0)
        )
    return found


def loss_of(config: BaseConfig) -> LossFunction:
    """The loss of a job or of a warm start."""
    job = config.rl
    return cross_entropy if job is None else policy_loss(job.learner.loss, job.rollout.max_tokens)


def value_loss_of(config: BaseConfig) -> LossFunction:
    """The loss of the job's critic."""
    critic = config.learner.value_model
    assert critic is not None
    return value_loss(critic.value_clip, critic.level)


def temperature_of(config: BaseConfig) -> float:
    return 1.0 if config.rl is None else config.rl.rollout.temperature
