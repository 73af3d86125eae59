"""The checks of a certificate: what the ranks of each trial found, against transformers and against one rank.

CHECKS is the list. Each of them reads the folder of a trial and gives the comparisons that apply to its config.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from common.config.certificate import OF_CRITIC, Check
from common.config.schema import BaseConfig
from learner.backend_protocol import Microbatch
from learner.certificate import reference
from learner.certificate.trial import ALONE, CRITIC, LAYOUT, ROUNDED, Trial, job, microbatches

HUGGING_FACE, ONE_RANK = "Hugging Face", "one rank"
OF_RANK = " of rank "
LOGPROBS = 5e-5  # nats, or a critic's unit, of any token
GRADIENT = 2e-5  # of the norm of each tensor's gradient
FIGURE = 1e-5  # relative: loss, norm of the gradients
UPDATE = 1e-3  # of the norm of each tensor's update
ADAPTED = 2e-3  # between two layouts after a step: Adam makes whole steps of small gradients
# In bfloat16 the median error may be so many times the one that transformers makes in bfloat16, and a little more.
ROUNDING = 4.0
FLOOR = 1e-3

Tensors = Mapping[str, Tensor]


class Evidence:
    """A prepared folder, in which the ranks have been, and what transformers makes of the same documents."""

    start, inside = "model", ""  # folders of the weights, and of the findings within a trial's
    rows = "log-probabilities"
    auto: Any = transformers.AutoModelForCausalLM  # typed without the loading info
    run = staticmethod(reference.run)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: BaseConfig = job(folder, LAYOUT)
        self.source: dict[str, Tensor] = load_file(folder / self.start / "model.safetensors")

    def place(self, trial: Trial) -> Path:
        return self.folder / trial.name / self.inside

    def of(self, trial: Trial) -> "Found | None":
        """The findings of a trial's ranks; None: it was not needed."""
        folder = self.place(trial)
        return Found(folder) if folder.is_dir() else None

    @cached_property
    def layout(self) -> "Found":
        return Found(self.place(LAYOUT))

    @cached_property
    def packs(self) -> list[Microbatch]:
        config = transformers.AutoConfig.from_pretrained(self.folder / "model")
        return microbatches(self.folder, config.vocab_size)

    def model(
        self, adapters: Tensors | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Any, dict[str, torch.nn.Parameter]]:
        """A new model of transformers with what the job trains, and its adapters: by default those of the start."""
        model = self.auto.from_pretrained(self.folder / self.start, dtype=dtype).eval()
        lora = self.config.learner.lora
        if self.config.learner.moe.freeze_router:
            for gate in reference.gates(model).values():
                gate.requires_grad_(False)
        if lora is None:
            return model, {}
        start = self.layout.section("adapter") if adapters is None else adapters
        return model, reference.adapt(model, start, lora.factor / lora.rank)

    def gradients(self, model: Any, adapters: Mapping[str, torch.nn.Parameter]) -> tuple[reference.Pass, Tensors]:
        """One pass, and the gradients of what trains by their names."""
        made = self.run(model, self.packs, self.config)
        made.loss.backward()
        if not adapters:
            return made, reference.gradients_in_files(model)
        return made, {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in adapters.items()}

    @cached_property
    def rounded(self) -> tuple[reference.Pass, Tensors]:
        """The same of a model in bfloat16."""
        return self.gradients(*self.model(dtype=torch.bfloat16))

    @cached_property
    def exact(self) -> tuple[reference.Pass, Tensors, float, Tensors]:
        """A pass in float32, its gradients, their norm, and what trains after a step of torch's AdamW."""
        model, adapters = self.model()
        made, gradients = self.gradients(model, adapters)
        moe = self.config.learner.moe
        parameters = [*dict.fromkeys(adapters.values())] or [*model.parameters()]
        norm = reference.adamw(parameters, self.config.learner.optimizer)
        if moe.balance == "bias":
            reference.move_biases(model, made.counts, moe.balance_rate)
        trained = {name: p.detach() for name, p in adapters.items()} if adapters else reference.in_files(model)
        return made, gradients, norm, trained


class CriticEvidence(Evidence):
    """The same of the job's critic, which trains wholly, and by its own optimizer."""

    start = inside = CRITIC
    rows = "values"
    auto = transformers.AutoModelForSequenceClassification
    run = staticmethod(reference.run_critic)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        learner: Any = self.config.learner
        self.config = replace(self.config, learner=replace(learner, lora=None, optimizer=learner.critic.optimizer))


class Found:
    """The tensors of all ranks of one trial.

    Ranks that share packs have found the same rows. One that differs in any bit is kept apart, as `NAME of rank R`:
    else it could hide another's error.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                if not torch.equal(self.tensors.setdefault(name, tensor), tensor):
                    self.tensors[f"{name}{OF_RANK}{file.stem}"] = tensor

    def section(self, prefix: str) -> dict[str, Tensor]:
        """Tensors named `prefix`.NAME, by NAME."""
        return {k.removeprefix(prefix + "."): v for k, v in self.tensors.items() if k.startswith(prefix + ".")}

    @property
    def figures(self) -> tuple[float, float]:
        """(loss, norm of the gradients)."""
        loss, norm = self.tensors["figures"].tolist()
        return loss, norm


# ---------------------------------------------------------------- differences


def furthest(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0


def relative(found: Tensor, expected: Tensor) -> float:
    """The norm of the error in units of the expected norm, in float64; of one where nothing is expected."""
    norm = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (norm or 1.0)


def worst(
    found: Tensors, expected: Tensors, difference: Callable[[Tensor, Tensor], float] = relative
) -> tuple[float, str]:
    """The largest difference, of any rank, and the tensor that has it; infinite for names that only one of them has."""
    names = {name: name.partition(OF_RANK)[0] for name in found}
    if others := sorted({*names.values()} ^ expected.keys()) or ["nothing"] * (not expected):
        return math.inf, f"{others[0]}, which only one of them has"
    errors = [(difference(found[name], expected[own]), name) for name, own in names.items()]
    return max(errors, key=lambda error: (math.isnan(error[0]), error))


def of_update(before: Tensors, found: Tensors, expected: Tensors) -> tuple[float, str]:
    """As `worst`, in units of the norm of each tensor's update."""
    if found.keys() != expected.keys():
        return worst(found, expected)
    errors = []
    for name, tensor in expected.items():
        moved, error = ((tensor.double() - x[name].double()).norm().item() for x in (before, found))
        errors.append((error / moved if moved else error and math.inf, name))
    return max(errors, key=lambda error: (math.isnan(error[0]), error))


def numbered(rows: list[Tensor]) -> dict[str, Tensor]:
    return {str(i): row for i, row in enumerate(rows)}


def furthest_rows(found: Tensors, expected: list[Tensor]) -> list[Tensor]:
    """The row of each pack; where ranks differ, that with the largest sum of errors."""

    def error(exact: Tensor, row: Tensor) -> tuple[bool, float]:
        total = (row - exact).abs().sum().item()
        return math.isnan(total), total

    ranks = [[row for name, row in found.items() if name.partition(OF_RANK)[0] == str(i)] for i in range(len(expected))]
    return [max(own, key=partial(error, exact)) for own, exact in zip(ranks, expected, strict=True)]


def _figures(against: str, found: tuple[float, float], expected: tuple[float, float]) -> Iterator[Check]:
    for name, one, other in zip(("loss", "norm of the gradients"), found, expected, strict=True):
        yield Check(name, against, abs(one - other) / (abs(other) or 1.0), FIGURE)


# ---------------------------------------------------------------- checks


def hugging_face(evidence: Evidence) -> Iterator[Check]:
    """Weights, log-probabilities, gradients and a step of the layout, in float32."""
    found = evidence.layout
    made, gradients, norm, trained = evidence.exact
    difference, where = worst(found.section("weight"), evidence.source, furthest)
    yield Check("loaded weights", HUGGING_FACE, difference, 0.0, where)
    difference, where = worst(found.section("logprobs"), numbered(made.logprobs), furthest)
    yield Check(evidence.rows, HUGGING_FACE, difference, LOGPROBS, f"pack {where}")
    difference, where = worst(found.section("gradient"), gradients)
    yield Check("gradients", HUGGING_FACE, difference, GRADIENT, where)
    yield from _figures(HUGGING_FACE, found.figures, (made.policy, norm))
    before = found.section("adapter") or evidence.source
    difference, where = of_update(before, found.section("trained"), trained)
    yield Check("one step", HUGGING_FACE, difference, UPDATE, where)


def adapters(evidence: Evidence) -> Iterator[Check]:
    """Gradients of the adapters after a step: both matrices of each have one then."""
    found = evidence.layout
    if evidence.config.learner.lora is None:
        return
    _, gradients = evidence.gradients(*evidence.model(found.section("trained")))
    difference, where = worst(found.section("again"), gradients)
    yield Check("gradients after a step", HUGGING_FACE, difference, GRADIENT, where)


@torch.no_grad()
def export(evidence: Evidence) -> Iterator[Check]:
    """transformers loads the exported folder, and computes what the learner does after the step."""
    saved = evidence.place(LAYOUT) / "saved"
    model, told = evidence.auto.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    wrong = sorted(str(name) for names in told.values() for name in names)
    made = evidence.run(model.eval(), evidence.packs, evidence.config)
    difference, where = worst(evidence.layout.section("after"), numbered(made.logprobs), furthest)
    if wrong:
        difference, where = math.inf, wrong[0]
    yield Check("export", HUGGING_FACE, difference, LOGPROBS, where if wrong else f"pack {where}")


def one_rank(evidence: Evidence) -> Iterator[Check]:
    """The layout against the same learner on one rank, in float32."""
    found, alone = evidence.layout, evidence.of(ALONE)
    if alone is None:
        return
    difference, where = worst(found.section("logprobs"), alone.section("logprobs"), furthest)
    yield Check(evidence.rows, ONE_RANK, difference, LOGPROBS, f"pack {where}")
    difference, where = worst(found.section("gradient"), alone.section("gradient"))
    yield Check("gradients", ONE_RANK, difference, GRADIENT, where)
    yield from _figures(ONE_RANK, found.figures, alone.figures)
    before = found.section("adapter") or evidence.source
    difference, where = of_update(before, found.section("trained"), alone.section("trained"))
    yield Check("one step", ONE_RANK, difference, UPDATE, where)
    if again := found.section("again"):
        difference, where = worst(again, alone.section("again"))
        yield Check("gradients after a step", ONE_RANK, difference, ADAPTED, where)


def rounded(evidence: Evidence) -> Iterator[Check]:
    """The layout in bfloat16: weights are rounded once, and errors are like those of transformers in bfloat16."""
    found = evidence.of(ROUNDED)
    if found is None:
        return
    made, gradients, _, _ = evidence.exact
    rounding, rounded_gradients = evidence.rounded
    kept = "e_score_correction_bias"
    expected = {n: x if n.endswith(kept) else x.bfloat16().float() for n, x in evidence.source.items()}
    difference, where = worst(found.section("weight"), expected, furthest)
    yield Check("loaded weights in bfloat16", HUGGING_FACE, difference, 0.0, where)
    exact = torch.cat(made.logprobs)
    mine = torch.cat(furthest_rows(found.section("logprobs"), made.logprobs))
    difference, theirs = ((x - exact).abs().median().item() for x in (mine, torch.cat(rounding.logprobs)))
    yield Check(f"median of {evidence.rows} in bfloat16", HUGGING_FACE, difference, FLOOR + ROUNDING * theirs)
    errors = [_median_error(x, gradients) for x in (found.section("gradient"), rounded_gradients)]
    yield Check("median of gradients in bfloat16", HUGGING_FACE, errors[0], FLOOR + ROUNDING * errors[1])


def _median_error(found: Tensors, expected: Tensors) -> float:
    if found.keys() != expected.keys():
        return math.inf
    errors = [relative(found[name], tensor) for name, tensor in expected.items() if tensor.any()]
    return torch.tensor(errors).median().item()


def critic(evidence: Evidence) -> Iterator[Check]:
    """The same of the critic, where the config has one: values are in the place of log-probabilities."""
    if evidence.config.learner.value_model is None:
        return
    own = CriticEvidence(evidence.folder)
    for part in (hugging_face, export, one_rank, rounded):
        for one in part(own):
            yield replace(one, name=OF_CRITIC + one.name)


CHECKS: tuple[Callable[[Evidence], Iterator[Check]], ...] = (hugging_face, adapters, export, one_rank, rounded, critic)
