"""The columns of a certificate's batch: what a job's loss asks for, and what its agents may name."""

from dataclasses import replace
from pathlib import Path

import torch
from msgspec.structs import replace as changed

from common.config.critic import CriticConfig
from common.config.loss_keys import DistillationConfig
from common.config.schema import Config
from common.config.tasks import SourceConfig, TasksConfig
from learner.certificate.batch import SEED, TEMPERATURES, columns, given, loss_of, packs, temperatures, value_loss_of
from learner.loss.losses import policy_loss
from tests.rigs.configs import config_of

VOCABULARY = 40


def job(folder: Path, **own: float) -> Config:
    """With a source for each KL coefficient in `own`."""
    sources = {n: SourceConfig(environment="addition", dataset="d", kl_coefficient=x) for n, x in own.items()}
    return config_of(folder, tasks=TasksConfig(sources=sources))


def distributions() -> torch.Tensor:
    """[T, VOCABULARY] of a policy."""
    count = sum(len(pack.tokens) for pack in packs(SEED, VOCABULARY))
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1)).log_softmax(-1)


def test_the_kl_term_of_a_source_enters_the_loss_at_its_documents_alone(tmp_path: Path) -> None:
    config, log_p = job(tmp_path, a=0.05, b=0.0), distributions()
    assert not config.learner.loss.kl_coefficient
    found = columns(config, log_p, None)
    pack, *_ = given(packs(SEED, VOCABULARY), found)
    assert pack.kl_coefficients is not None and pack.document_lengths == (40, 3, 17)
    assert torch.equal(pack.kl_coefficients, torch.tensor([0.05] * 40 + [0.0] * 3 + [0.05] * 17))
    logprobs = log_p.gather(1, torch.cat([each.targets for each in packs(SEED, VOCABULARY)])[:, None])[:, 0]
    begun = [logprobs[: len(pack.tokens)].clone().requires_grad_() for _ in range(2)]
    loss_of(config)(begun[0], None, pack).loss_sum.backward()
    without = policy_loss(config.learner.loss, config.rollout.max_tokens)
    without(begun[1], None, replace(pack, kl_coefficients=torch.zeros(60))).loss_sum.backward()
    assert begun[0].grad is not None and begun[1].grad is not None
    differs = begun[0].grad != begun[1].grad
    assert torch.equal(differs, (pack.loss_mask > 0) & (pack.kl_coefficients > 0))


def test_a_job_without_a_kl_term_or_sources_has_no_columns_for_them(tmp_path: Path) -> None:
    assert not {"reference_logprobs", "kl_coefficients"} & columns(config_of(tmp_path), distributions(), None).keys()
    assert "reference_logprobs" not in columns(job(tmp_path, a=0.0), distributions(), None)


def test_the_bound_of_a_critic_acts_on_some_of_its_values(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config = changed(config, learner=changed(config.learner, critic=CriticConfig(value_clip=0.2)))
    values = torch.randn(len(distributions()))
    found = columns(config, distributions(), None, values)
    pack, *_ = given(packs(SEED, VOCABULARY), found)
    clipped = value_loss_of(config)(values[:60], None, pack).sums["value_clipped"]
    assert 0 < clipped < pack.loss_mask.sum()


def test_some_tokens_have_a_temperature_of_their_own_except_beside_a_teacher(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    column = temperatures(config)["temperatures"]
    assert len(column) == len(distributions())
    assert torch.equal(column.unique(), torch.tensor(TEMPERATURES))
    loss = changed(config.learner.loss, distillation=DistillationConfig(teacher="t"))
    assert temperatures(changed(config, learner=changed(config.learner, loss=loss))) == {}
