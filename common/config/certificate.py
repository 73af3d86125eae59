"""A certificate: numbers of a job that `slipstream certify` has proven in miniature, and the config that it proved.

The miniature runs on a few CPU ranks, so every kind of parallelism has two ranks at most. A certificate stores what
was proven, not a digest of it, so that a reason can name the key in which a job differs. No torch.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.config.schema import BaseConfig, ParallelConfig, RanksConfig

OF_CRITIC = "critic: "  # begins the names of the checks of a critic
MOST_RANKS = 4  # data parallelism is left out where it would take more
# Names in config.json that say nothing of what the model computes.
UNRELATED = {
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "initializer_range", "auto_map",
}  # fmt: skip


class Check(msgspec.Struct, frozen=True):
    """One comparison of the miniature under the folded layout."""

    name: str  # 'gradients', for example
    against: str  # 'Hugging Face', or 'one rank'
    difference: float
    limit: float
    where: str = ""  # the tensor with the largest difference

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # not for nan

    def __str__(self) -> str:
        of = f", at {self.where}" if self.where else ""
        return f"{self.name} against {self.against}: difference {self.difference:.1e}, limit {self.limit:.1e}{of}"


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Names the proof, the code and the packages; every check has passed."""

    config: str  # the config's name
    made: str  # UTC
    commit: str | None  # the source tree's, for people; None outside of a checkout
    modified: bool  # whether the tree had changes besides
    versions: dict[str, str]  # as common.process.versions gives them
    source: str  # digest of the code that computes: common.process.versions.learner_digest
    covers: dict[str, Any]  # `covered`
    folded: list[str]  # sizes of the layout that differ in miniature
    ranks: int
    took_s: float
    checks: list[Check]


class Folded(msgspec.Struct, frozen=True):
    """A layout for few ranks with the same kinds of parallelism."""

    parallel: ParallelConfig
    ranks: int
    said: list[str]  # 'tensor 8 -> 2'

    @property
    def data(self) -> int:
        return self.ranks // self.parallel.model_ranks


def fold(learner: RanksConfig) -> Folded:
    """Every size is 2 at most. Data parallelism is 1 beyond MOST_RANKS, unless experts need its ranks.

    Stages of uneven size stay uneven, except under a virtual pipeline.
    """
    real = learner.parallel
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor")
    sizes = {name: min(2, getattr(real, name)) for name in names}
    uneven = bool(real.first_stage_layers or real.last_stage_layers) and sizes["virtual_pipeline"] == 1
    parallel = ParallelConfig(**sizes, sequence=real.sequence, first_stage_layers=3 if uneven else None)
    experts = parallel.pipeline * parallel.expert * parallel.expert_tensor
    given = learner.world_size // real.model_ranks
    fits = [n for n in (1, 2, 4) if parallel.model_ranks * n % experts == 0]
    wanted = 2 if given > 1 and 2 * parallel.model_ranks <= MOST_RANKS else 1
    data = min((n for n in fits if n >= wanted), default=fits[-1])
    told = (*names, "first_stage_layers", "last_stage_layers")
    was, now = ({name: getattr(x, name) or "unset" for name in told} for x in (real, parallel))
    was["data"], now["data"] = given, data
    said = [f"{name} {was[name]} -> {now[name]}" for name in was if was[name] != now[name]]
    return Folded(parallel, parallel.model_ranks * data, said)


def _given(section: msgspec.Struct | None) -> dict[str, Any] | None:
    """The keys of a section that are not at their default: a key that is new later changes no certificate."""
    if section is None:
        return None
    fields = msgspec.structs.fields(section)
    made = {f.name: f.default if f.default_factory is msgspec.NODEFAULT else f.default_factory() for f in fields}
    return {name: value for name, value in msgspec.structs.asdict(section).items() if value != made[name]}


def covered(config: BaseConfig, document: Mapping[str, object]) -> dict[str, Any]:
    """Everything of a config and of its model's config.json that a certificate is about, as JSON has it."""
    learner, job = config.learner, config.rl
    folded = fold(learner)
    found: dict[str, Any] = {
        "model": {name: document[name] for name in sorted(document) if name not in UNRELATED},
        "dtype": config.model.dtype,
        "layout": {**(_given(folded.parallel) or {}), "data": folded.data},
        "memory": _given(learner.memory),
        "overlap": learner.overlap,
        "moe": _given(learner.moe),
        "lora": _given(learner.lora),
        "extra": learner.megatron.extra,
        "loss": "cross-entropy",
    }
    if job is not None:
        loss = msgspec.structs.replace(job.learner.loss, reference=None, kl_stop=None)
        found |= {"loss": _given(loss), "several_updates": learner.updates > 1}
        found |= {"temperature": job.rollout.temperature, "max_tokens": job.rollout.max_tokens}
        if job.tasks.sources:
            found["kl_coefficients"] = sorted({source.learner.loss.kl_coefficient for source in job.sources.values()})
    if learner.value_model is not None:
        given = _given(learner.value_model) or {}  # its loss has two of the keys
        found["critic"] = {name: given[name] for name in ("value_clip", "level") if name in given}
    return msgspec.json.decode(msgspec.json.encode(found), type=dict[str, Any])
