"""Certificates of jobs with everything that they may ask for.

There is none without any correction of the bridge, and none with an error in the critic.
"""

import ast
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from common.config.certificate import OF_CRITIC, Check, fold
from common.config.critic_checks import SCORE
from common.config.loading import load_either
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
from learner.certificate.checks import CHECKS, Evidence, critic
from learner.certificate.rank import measure
from learner.certificate.trial import LAYOUT, OPTIMIZER, Trial, prepare, trial_of, trials
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
    file: str = ""  # the config in configs/ that it is, with overrides
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> BaseConfig:
        if self.file:
            return load_either(ROOT / "configs" / self.file, [f"learner.world_size={self.world}", *self.overrides])
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
PPO, TENSOR = "guessing-ppo.yaml", ("learner.parallel.tensor=2",)
CLIPPED = ("learner.minibatches=2", "learner.critic.value_clip=0.2", "learner.lora={rank: 4}", "model.dtype=bfloat16")
JOBS = {
    "adapters": Case("tied", {"tensor": 2, "pipeline": 2}, {"lora": LoraConfig(rank=4)}, 4, "bfloat16"),
    "several updates": Case("untied", {"context": 2}, UPDATES, 2, kl={"a": 0.05, "b": 0.2, "c": 0.0}),
    "teacher": Case("llama", {}, {"loss": STUDENT, "memory": AGAIN}, 2),
    "routed": Case("deepseek-v3", {"pipeline": 2, "expert": 2}, {"moe": BOTH}, 4),
    "balanced": Case("mixtral", {"expert": 2}, {"moe": MoeConfig(balance="aux_loss", balance_rate=0.3)}, 2, sft=True),
    "frozen": Case("moe", {}, {"moe": msgspec.structs.replace(REPLAY, freeze_router=True)}, 1, "bfloat16"),
    "critic": Case("tied", world=2, file=PPO, overrides=TENSOR),
    "critic beside adapters": Case("tied", dtype="bfloat16", file=PPO, overrides=CLIPPED),
}
KINDS = [case.kind for case in JOBS.values()]
# Every correction of bridge_fixes.py, with a model that needs it. Bridges get the window wrong in two ways.
CORRECTIONS = {
    "patch_bridge": Case("tied", {"pipeline": 2, "virtual_pipeline": 2}, world=2),
    "correct_window": Case("mistral"),
    "correct_window forgotten": Case("qwen2-window"),
    "give_rope_theta+check_rope": Case("tied"),  # the check alone would correct the base
    "correct_router": Case("moe"),
    "correct_shared_experts": Case(FURTHER),
    "correct_further_tokens": Case(FURTHER),
    "correct_latent_attention": Case("deepseek-v3-rope"),
    "correct_latent_norms": Case("deepseek-v3"),
    "check_rope": Case("llama"),
    "MixtralBridge.provider_bridge": Case("mixtral"),
    "MixtralBridge.mapping_registry": Case("mixtral"),
}
# Corrections without which a rank ends with an error, and words of it.
REFUSED = {
    "patch_bridge": "AssertionError: Output layer not found",
    "correct_shared_experts": "Shape mismatch for megatron param decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "correct_further_tokens": "has no weights for mtp.layers.0.",
    "MixtralBridge.provider_bridge": "has no weights for decoder.layers.0.self_attention.q_layernorm.weight",
    "MixtralBridge.mapping_registry": "Megatron has no place for model.layers.0.block_sparse_moe.experts.0.w1.weight",
}


def nothing(*_: Any) -> None:
    pass


def summed(gather: Any, hidden: Any, **more: Any) -> Any:
    return gather(hidden, **more | {"tensor_parallel_output_grad": True})


def headless(write: Any, source: Path, path: Path, tensors: Any, changed: Any) -> None:
    write(source, path, ((name, tensor) for name, tensor in tensors if name != SCORE), changed)


def of_the_policy(optimizer: Any, chunks: Any, learner: Any, *more: Any) -> Any:
    return optimizer(chunks, msgspec.structs.replace(learner, optimizer=OPTIMIZER), *more)


# Names in critic.py with a wrong function in their place, and the first check that fails then.
WRONG: dict[str, tuple[Any, str]] = {
    "_load_head": (nothing, "loaded weights"),
    "gather_from_sequence_parallel_region": (summed, "gradients"),
    "Optimizer": (of_the_policy, "one step"),
    "write_folder": (headless, "export"),
}
ERRORS = {f"critic.{name}": Case("tied", file=PPO) for name in WRONG}
SUMMED = "critic.gather_from_sequence_parallel_region"  # nothing to sum on one rank
ERRORS[SUMMED] = Case("tied", world=2, file=PPO, overrides=TENSOR)
# With the correction in place each of these is certified; the other kinds are among the jobs.
NEEDING = {str(case): name for name, case in CORRECTIONS.items() if case.kind not in KINDS or case.parallel}
PLAIN = {f"{name} in place": CORRECTIONS[name] for name in NEEDING.values()}
WHOLE = JOBS | PLAIN
ALL = WHOLE | CORRECTIONS | ERRORS


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
    """The layout without one correction, or with one error in the critic."""
    from learner.megatron import critic
    from learner.megatron.conversion import bridge_fixes, hf_folder

    with ExitStack() as changed:
        for one in spec["case"].split()[0].split("+"):
            *owner, name = one.split(".")
            place: Any = hf_folder if name == "give_rope_theta" else bridge_fixes
            other: Any = nothing
            if spec["case"] in ERRORS:
                place, other = critic, partial(WRONG[name][0], getattr(critic, name))
            elif owner:
                place = getattr(bridge_fixes, owner[0])
                other = getattr(place.__mro__[1], name)
            changed.enter_context(patch.object(place, name, other))
        try:
            measure(folder / spec["case"], LAYOUT)
        except Exception as error:
            with (folder / f"{spec['case']}.error").open("a") as file:
                file.write(f"{type(error).__name__}: {error}\n")
            raise


def job_check(folder: Path, spec: dict[str, Any]) -> None:
    """Every check of a folder in which the ranks have been; with something wrong, up to the first that fails."""
    checks: list[Check] = []
    if any((folder / spec["case"] / LAYOUT.name).glob("*.safetensors")):
        evidence = Evidence(folder / spec["case"])
        parts = [critic] if spec["case"] in ERRORS else CHECKS
        for one in (one for part in parts for one in part(evidence)):
            checks.append(one)
            if spec["case"] not in WHOLE and not one.passed:
                break
    (folder / f"{spec['case']}.checks").write_bytes(msgspec.msgpack.encode(checks))  # JSON has no inf


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
    cases = (CORRECTIONS | ERRORS).items()
    without = [{"name": f"{name}-without", "case": name, "ranks": case.world} for name, case in cases]
    return forked_ranks.run(
        tmp_path_factory,
        group(job_prepare, [{"case": name} for name in ALL], shared=True),
        group(job_measure, measured, shared=True),
        # patch_bridge changes a class for good, so its spec is the first of a world: that of those with two ranks
        group(job_without, without, shared=True),
        group(job_check, [{"case": name} for name in ALL], shared=True),
    )


def checks_of(folder: Path, case: str) -> list[Check]:
    return msgspec.msgpack.decode((folder / f"{case}.checks").read_bytes(), type=list[Check])


def wrong(folder: Path, case: str) -> list[Check]:
    """The checks up to the first that failed; a rank that ended with an error fails the test."""
    ended = folder / f"{case}-without.failed"
    assert not ended.exists(), ended.read_text()
    return checks_of(folder, case)


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
    assert ("gradients after a step" in {one.name for one in found}) == ("adapters" in case)
    assert ("critic: export" in {one.name for one in found}) == ("critic" in case)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_a_correction_there_is_no_certificate(folder: Path, correction: str) -> None:
    if correction in REFUSED:
        assert REFUSED[correction] in (folder / f"{correction}.error").read_text()
    else:
        assert [one for one in wrong(folder, correction) if not one.passed]


@pytest.mark.parametrize("error", ERRORS)
def test_with_an_error_in_the_critic_there_is_no_certificate(folder: Path, error: str) -> None:
    expected = OF_CRITIC + WRONG[error.removeprefix("critic.")][1]
    assert [one.name for one in wrong(folder, error) if not one.passed] == [expected]


def test_every_correction_of_the_bridge_is_tried() -> None:
    tree = ast.parse((ROOT / "learner" / "megatron" / "conversion" / "bridge_fixes.py").read_text()).body
    functions = {each.name for each in tree if isinstance(each, ast.FunctionDef)}
    classes = [each for each in tree if isinstance(each, ast.ClassDef)]
    methods = {f"{c.name}.{f.name}" for c in classes for f in c.body if isinstance(f, ast.FunctionDef)}
    others = {"correct_provider", "within_the_part"}  # the list of corrections, and what is none
    listed = {name for name in functions if name[0] != "_"} - others | methods | {"give_rope_theta"}
    assert listed == {one for name in CORRECTIONS for one in name.split()[0].split("+")}
