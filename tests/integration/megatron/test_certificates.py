"""Certificates of jobs with everything that they may ask for, and none without any correction of the bridge."""

import ast
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from common.config.certificate import Check, fold
from common.config.lora import LoraConfig
from common.config.loss_keys import DistillationConfig, LossConfig
from common.config.schema import (
    BaseConfig,
    Config,
    LearnerConfig,
    MemoryConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    RunConfig,
    SftConfig,
    SftLearnerConfig,
)
from common.config.scorers import ScorerConfig
from common.config.tasks import SftTasksConfig, SourceConfig, TasksConfig
from learner.certificate.checks import CHECKS, Evidence
from learner.certificate.rank import measure
from learner.certificate.trial import LAYOUT, Trial, prepare, trial_of, trials
from tests.rigs import forked_ranks, tiny_models
from tests.rigs.forked_ranks import group
from tests.rigs.processes import ROOT


@dataclass(frozen=True)
class Case:
    """A job of a tiny model on `world` ranks."""

    kind: str | tiny_models.Kind
    parallel: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)
    world: int = 1
    dtype: str = "float32"
    sft: bool = False
    kl: dict[str, float] = field(default_factory=dict)  # KL coefficients of tasks.sources

    @property
    def config(self) -> BaseConfig:
        run = RunConfig(name="certified", dir="nowhere", steps=3)
        model = ModelConfig(path="nowhere", dtype=self.dtype)
        given = {"world_size": self.world, "parallel": ParallelConfig(**self.parallel), **self.learner}
        if self.sft:
            return SftConfig(run=run, model=model, tasks=SftTasksConfig(dataset="n"), learner=SftLearnerConfig(**given))
        own: dict[str, Any] = {"environment": "none", "dataset": "none"}
        sources = {name: SourceConfig(**own, kl_coefficient=coefficient) for name, coefficient in self.kl.items()}
        tasks = TasksConfig(sources=sources) if sources else TasksConfig(**own)
        scorers = {"t": ScorerConfig(kind="teacher", url="http://127.0.0.1:1", model="t")}
        job = Config(run=run, model=model, tasks=tasks, learner=LearnerConfig(**given))
        return job if job.learner.loss.distillation is None else msgspec.structs.replace(job, scorers=scorers)


FURTHER: tiny_models.Kind = ("Glm4Moe", {"num_nextn_predict_layers": 1})  # the kind "glm" and a further head
REPLAY, BOTH = MoeConfig(replay_routing=True), MoeConfig(replay_routing=True, balance="bias")
UPDATES: dict[str, Any] = {"minibatches": 2, "loss": LossConfig(objective="clip_cov", entropy_coefficient=0.1)}
TEACHER = DistillationConfig(teacher="t", objective="forward_kl", top_k=5)
STUDENT = LossConfig(correction="mis", reduction="sequence_mean", kl_coefficient=0.1, distillation=TEACHER)
AGAIN = MemoryConfig(recompute="full", offload_gradients=True)
JOBS = {
    "adapters": Case("tied", {"tensor": 2, "pipeline": 2}, {"lora": LoraConfig(rank=4)}, 4, "bfloat16"),
    "several updates": Case("untied", {"context": 2}, UPDATES, 2, kl={"a": 0.05, "b": 0.2, "c": 0.0}),
    "teacher": Case("llama", {}, {"loss": STUDENT, "memory": AGAIN}, 2),
    "routed": Case("deepseek-v3", {"pipeline": 2, "expert": 2}, {"moe": BOTH}, 4),
    "balanced": Case("mixtral", {"expert": 2}, {"moe": MoeConfig(balance="aux_loss", balance_rate=0.3)}, 2, sft=True),
    "frozen": Case("moe", {}, {"moe": msgspec.structs.replace(REPLAY, freeze_router=True)}, 1, "bfloat16"),
}
KINDS = [case.kind for case in JOBS.values()]
# Every correction of bridge_fixes.py, with a model that needs it.
CORRECTIONS = {
    "patch_bridge": Case("tied", {"pipeline": 2, "virtual_pipeline": 2}, world=2),
    "correct_window": Case("mistral"),
    "correct_router": Case("moe"),
    "correct_shared_experts": Case("glm"),
    "correct_further_tokens": Case(FURTHER),
    "correct_latent_attention": Case("deepseek-v3-rope"),
    "correct_latent_norms": Case("deepseek-v3"),
    "check_rope": Case("llama"),
    "MixtralBridge.provider_bridge": Case("mixtral"),
    "MixtralBridge.mapping_registry": Case("mixtral"),
}
# With the correction in place each of these is certified; the other kinds are among the jobs.
PLAIN = {f"{name} in place": case for name, case in CORRECTIONS.items() if case.kind not in KINDS or case.parallel}
WHOLE = JOBS | PLAIN
ALL = WHOLE | CORRECTIONS


def job_prepare(folder: Path, spec: dict[str, Any]) -> None:
    """The folder of a trial."""
    case, own = ALL[spec["case"]], folder / spec["case"]
    model = tiny_models.new_model(case.kind, num_hidden_layers=2)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(own / "source")
    prepare(own, case.config, own / "source")


def job_measure(folder: Path, spec: dict[str, Any]) -> None:
    """One trial, in the way of the product's own ranks."""
    measure(folder / spec["case"], trial_of(spec["trial"]))


def job_without(folder: Path, spec: dict[str, Any]) -> None:
    """The layout without one correction."""
    from learner.megatron.conversion import bridge_fixes

    *owner, name = spec["case"].split(".")
    place: Any = getattr(bridge_fixes, owner[0]) if owner else bridge_fixes
    other = getattr(place.__mro__[1], name) if owner else lambda *arguments: None
    with patch.object(place, name, other):
        measure(folder / spec["case"], LAYOUT)


def job_check(folder: Path, spec: dict[str, Any]) -> None:
    """Every check of a folder in which the ranks have been; without a correction, up to the first that fails."""
    checks: list[Check] = []
    if any((folder / spec["case"] / LAYOUT.name).glob("*.safetensors")):
        evidence = Evidence(folder / spec["case"])
        for one in (one for part in CHECKS for one in part(evidence)):
            checks.append(one)
            if spec["case"] in CORRECTIONS and not one.passed:
                break
    (folder / f"{spec['case']}.json").write_bytes(msgspec.json.encode(checks))


def ranks(case: str, trial: Trial) -> int:
    return 1 if trial.alone else fold(ALL[case].config.learner).ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tried = [(name, trial) for name in WHOLE for trial in trials(ALL[name].config)]
    measured = [
        {"name": f"{name}-{trial.name}", "case": name, "trial": trial.name, "ranks": ranks(name, trial)}
        for name, trial in tried
        if name in JOBS or not trial.alone
    ]
    without = [{"name": f"{name}-without", "case": name, "ranks": case.world} for name, case in CORRECTIONS.items()]
    return forked_ranks.run(
        tmp_path_factory,
        group(job_prepare, [{"case": name} for name in ALL], shared=True),
        group(job_measure, measured, shared=True),
        # patch_bridge, which changes a class for good, has a world of its own: no other spec needs two ranks
        group(job_without, without, shared=True),
        group(job_check, [{"case": name} for name in ALL], shared=True),
    )


def checks_of(folder: Path, case: str) -> list[Check]:
    return msgspec.json.decode((folder / f"{case}.json").read_bytes(), type=list[Check])


@pytest.mark.parametrize("case", WHOLE)
def test_every_check_passes(folder: Path, case: str) -> None:
    failed = [file.read_text() for file in folder.glob(f"{case}-*.failed")]
    assert not failed, failed[0]
    found = checks_of(folder, case)
    assert [str(one) for one in found if not one.passed] == []
    assert {"loaded weights", "log-probabilities", "gradients", "one step", "export"} <= {one.name for one in found}
    several = fold(ALL[case].config.learner).ranks > 1 and case in JOBS
    assert ("one rank" in {one.against for one in found}) == several
    assert any("bfloat16" in one.name for one in found) == (ALL[case].dtype == "bfloat16")
    assert ("gradients after a step" in {one.name for one in found}) == (case == "adapters")


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_a_correction_there_is_no_certificate(folder: Path, correction: str) -> None:
    failed = (folder / f"{correction}-without.failed").exists()  # a rank ended with an error
    assert failed or [one for one in checks_of(folder, correction) if not one.passed]


def test_every_correction_of_the_bridge_is_tried() -> None:
    tree = ast.parse((ROOT / "learner" / "megatron" / "conversion" / "bridge_fixes.py").read_text()).body
    functions = {each.name for each in tree if isinstance(each, ast.FunctionDef)}
    classes = [each for each in tree if isinstance(each, ast.ClassDef)]
    methods = {f"{c.name}.{f.name}" for c in classes for f in c.body if isinstance(f, ast.FunctionDef)}
    others = {"correct_provider", "within_the_part"}  # the list of corrections, and what is none
    assert {name for name in functions if name[0] != "_"} - others | methods == set(CORRECTIONS)
