"""The folder of a certificate's trial: a miniature of the job's model, its config, and the columns of its batch.

- model: a Hugging Face folder with random weights;
- critic: a value model of that shape with other weights, where the job has a critic;
- job.yaml: the job's config for that model and the folded layout;
- columns.safetensors: rows of the batch that depend on the job;
- NAME: the findings of each rank in the trial of that name; NAME/critic has those of the critic.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.config.certificate import Folded, fold
from common.config.critic import CriticOptimizerConfig
from common.config.critic_checks import CRITIC_SUFFIX
from common.config.loading import dump_yaml, load_either
from common.config.schema import BaseConfig, LearnerConfig, OptimizerConfig, ParallelConfig
from learner.backend_protocol import Microbatch
from learner.certificate import batch, reference
from learner.megatron.conversion import hf_folder, tiny_model

# eps: with 1e-8 Adam makes whole steps of the rounding of gradients that are nearly zero
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-4, weight_decay=0.01, grad_clip=1.0)
CRITIC_OPTIMIZER = CriticOptimizerConfig(lr=2e-3, eps=1e-4, weight_decay=0.02, grad_clip=0.5)
ADAPTERS_LR = 3e-2  # their product starts at zero; a large step lets it matter
COLUMNS = "columns.safetensors"
CRITIC = "critic"
SHORT = 32  # positions that the miniature's rotary embeddings were made for, so that scaling matters to short documents


class Trial(NamedTuple):
    name: str
    alone: bool = False  # on one rank
    dtype: str = "float32"


LAYOUT, ALONE, ROUNDED = Trial("layout"), Trial("one", alone=True), Trial("rounded", dtype="bfloat16")


def trial_of(name: str) -> Trial:
    return next(each for each in (LAYOUT, ALONE, ROUNDED) if each.name == name)


def trials(config: BaseConfig) -> list[Trial]:
    """Those that a config needs: its layout, one rank unless that is its layout, and bfloat16 where it trains so."""
    several = fold(config.learner).ranks > 1
    return [LAYOUT, *[ALONE] * several, *[ROUNDED] * (config.model.dtype == "bfloat16")]


def miniature(source: Path, folded: Folded) -> Any:
    """The transformers configuration of a miniature of the model whose config.json is in `source`."""
    small = tiny_model.config_of(hf_folder.read_config(source), folded.parallel)
    rope = getattr(small, "rope_parameters", None) or {}
    if "original_max_position_embeddings" in rope:
        small.rope_parameters = rope | {"original_max_position_embeddings": SHORT}
    return small


def prepare(folder: Path, config: BaseConfig, source: Path) -> None:
    """Write the folder of a trial, for the model whose config.json is in `source`. Raises UsageError."""
    folded = fold(config.learner)
    model = tiny_model.new_model(miniature(source, folded))
    model.save_pretrained(folder / "model")
    (folder / "job.yaml").write_text(dump_yaml(_job(config, folder, folded)))
    own = batch.temperatures(config)
    packs = batch.given(batch.packs(batch.SEED, model.config.vocab_size), own)
    with torch.no_grad():
        rows = [reference.distributions(model, pack, batch.temperature_of(config)) for pack in packs]
        values = _values(folder, model.config, packs) if config.learner.value_model is not None else None
    columns = own | batch.columns(config, torch.cat(rows), _routing(model), values)
    save_file({name: column.contiguous() for name, column in columns.items()}, folder / COLUMNS)


def _values(folder: Path, policy: Any, packs: list[Microbatch]) -> Tensor:
    """[T] of all packs by a new critic, whose folder is written; `policy`: the miniature's configuration.

    The head of a job's critic may start with zeros, and no other parameter would have a gradient then.
    """
    small = copy.deepcopy(policy)
    small.num_labels = 1
    small.architectures = [policy.architectures[0].removesuffix("ForCausalLM") + CRITIC_SUFFIX]
    critic = tiny_model.new_model(small, seed=6)
    critic.save_pretrained(folder / CRITIC)
    return torch.cat([reference.values(critic, pack) for pack in packs])


def _routing(model: Any) -> tuple[int, int, int] | None:
    gates = [*reference.gates(model).values()]
    return (len(gates), gates[0].num_experts, gates[0].top_k) if gates else None


def _job(config: BaseConfig, folder: Path, folded: Folded) -> BaseConfig:
    optimizer = OPTIMIZER if config.learner.lora is None else replace(OPTIMIZER, lr=ADAPTERS_LR)
    learner: Any = replace(
        config.learner, world_size=folded.ranks, machines=1, parallel=folded.parallel, optimizer=optimizer
    )
    if learner.lora is not None:  # dropped places are random, and differ between layouts
        learner = replace(learner, lora=replace(learner.lora, dropout=0.0))
    if isinstance(learner, LearnerConfig):  # the batch has the reference's log-probabilities
        learner = replace(learner, loss=replace(learner.loss, reference=None))
    if learner.value_model is not None:
        learner = replace(
            learner, critic=replace(learner.value_model, path=str(folder / CRITIC), optimizer=CRITIC_OPTIMIZER)
        )
    model = replace(config.model, path=str(folder / "model"), verify=False)
    return replace(config, model=model, learner=learner)


def job(folder: Path, trial: Trial) -> BaseConfig:
    """The config of one trial."""
    config = load_either(folder / "job.yaml")
    learner = config.learner
    if trial.alone:
        learner = replace(learner, world_size=1, parallel=ParallelConfig())
    return replace(config, learner=learner, model=replace(config.model, dtype=trial.dtype))


def microbatches(folder: Path, vocabulary: int) -> list[Microbatch]:
    """The packs of all data-parallel ranks."""
    return batch.given(batch.packs(batch.SEED, vocabulary), load_file(folder / COLUMNS))
