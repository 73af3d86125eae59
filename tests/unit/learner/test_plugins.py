"""Parts of the loss by import path: those of examples/ pass every check, and each kind of mistake is found."""

import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from torch import Tensor

from common.config.loading import dump_yaml
from common.config.loss import (
    CORRECTION_BOUNDS,
    MARKING,
    clip_bounds,
    correction_bounds,
    loss_problems,
    plugins,
)
from common.config.loss_keys import LossConfig
from common.config.schema import Config
from common.errors import ConfigError
from common.rollouts import Group
from learner.batch.batch import assemble
from learner.loss import plugin_check
from learner.loss.advantages import ADVANTAGES
from learner.loss.corrections import CORRECTIONS
from learner.loss.losses import KL_ESTIMATORS, REDUCTIONS, policy_loss
from learner.loss.objectives import OBJECTIVES
from learner.loss.plugin_check import Fixed, check, check_advantage, check_loss, loss_config
from learner.loss.plugins import ask, part
from tests.rigs.configs import model_folder
from tests.rigs.processes import ROOT
from tests.rigs.waiting import LIMIT_S
from tests.unit.learner.loop_fakes import MakeWorld
from tests.unit.learner.test_batch import sample
from tests.unit.learner.test_losses import CASE, EXTRAS, GRID, MAX_TOKENS, describe

EXAMPLES: dict[str, Any] = {
    "objective": "examples.loss_parts:topr",
    "objective_options": {"most": 0.9},
    "advantage": "examples.loss_parts:over_median",
    "advantage_options": {"scale": 2.0},
    "correction": "examples.loss_parts:v_trace",
    "reduction": "examples.loss_parts:root_of_length",
    "kl_estimator": "examples.loss_parts:both_ways",
}

SOURCE = """
import numpy as np
import torch
from learner.loss.types import Corrected, GroupRewards, Surrogate, bounded_exp

NUMBER = 3

def ratio(tokens):
    return bounded_exp(tokens.logprobs - tokens.proximal_logprobs)

def said(tokens, values):
    return Surrogate(values, torch.zeros_like(tokens.documents.mask))

def divides_by_tokens(tokens, config):
    return said(tokens, ratio(tokens) * tokens.advantages / len(tokens.logprobs))

def normalises_advantages(tokens, config):
    centred = tokens.advantages - tokens.advantages[tokens.documents.mask].mean()
    return said(tokens, ratio(tokens) * centred)

def overflows(tokens, config):
    return said(tokens, torch.exp(4 * (tokens.logprobs - tokens.proximal_logprobs)) * tokens.advantages)

def is_nan(tokens, config):
    return said(tokens, ratio(tokens) * tokens.advantages * (0 * tokens.advantages).log())

def has_no_gradient(tokens, config):
    return said(tokens, ratio(tokens).detach() * tokens.advantages)

def has_gradient_0(tokens, config):
    return said(tokens, ratio(tokens) * 0)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient

def has_a_wrong_gradient(tokens, config):
    return said(tokens, Doubled.apply(ratio(tokens)) * tokens.advantages)

def draws(tokens, config):
    return said(tokens, ratio(tokens) * tokens.advantages * torch.rand(len(tokens.logprobs)))

def looks_outside(tokens, config):
    count = len(tokens.documents.counts)
    index = tokens.documents.spread(torch.arange(count))
    whole = tokens.advantages.new_zeros(count).index_add(0, index, tokens.advantages)
    return said(tokens, ratio(tokens) * tokens.documents.spread(whole))

def takes_too_little(tokens):
    return said(tokens, tokens.logprobs)

def raises(tokens, config):
    raise RuntimeError("half written")

def counts_microbatches(count):
    return None, torch.ones(())

def means(log_ratio):
    return (log_ratio - log_ratio.mean()) ** 2

def is_half(log_ratio):
    return log_ratio ** 2 + 0.5

def weighs_by_the_microbatch(log_weights, documents, config):
    weights = log_weights.exp() / log_weights.exp().max()
    nowhere = torch.zeros_like(documents.mask)
    return Corrected(weights, nowhere, nowhere, documents.mask)

def counts_failures(groups):
    return [np.nan_to_num(group.totals) - np.nan_to_num(group.totals).mean() for group in groups]

def is_not_finite(groups):
    return [np.full(len(group.totals), np.inf) for group in groups]

def looks_at_places(groups):
    return [np.where(np.isnan(g.totals), 0, g.totals * np.arange(len(g.totals))) for g in groups]

def looks_at_the_first_group(groups):
    base = np.nan_to_num(groups[0].totals).mean()
    return [np.nan_to_num(g.totals - base, nan=0.0) for g in groups]

def is_too_short(groups):
    return [np.zeros(1) for group in groups]

def is_0(groups):
    return [np.zeros(len(group.totals)) for group in groups]
"""

MISTAKES = {  # key, name, facts of the sentence
    ("objective", "divides_by_tokens"): ("microbatch of its own", "divide"),
    ("objective", "normalises_advantages"): ("microbatch of its own", "divide"),
    ("objective", "overflows"): ("float32", "50", "bounded_exp"),
    ("objective", "is_nan"): ("loss is nan",),
    ("objective", "has_no_gradient"): ("no gradient",),
    ("objective", "has_gradient_0"): ("0 everywhere",),
    ("objective", "has_a_wrong_gradient"): ("the gradient at place 1 is", "finite differences give"),
    ("objective", "draws"): ("the same microbatch has the loss", "and then"),
    ("objective", "looks_outside"): ("other numbers outside the loss",),
    ("objective", "takes_too_little"): ("too many positional arguments",),
    ("objective", "raises"): ("RuntimeError: half written",),
    ("objective", "absent"): ("has no 'absent'",),
    ("objective", "NUMBER"): ("which is a int",),
    ("reduction", "counts_microbatches"): ("microbatch of its own",),
    ("kl_estimator", "means"): ("microbatch of its own",),
    ("kl_estimator", "is_half"): ("0.5", "from itself"),
    ("correction", "weighs_by_the_microbatch"): ("microbatch of its own",),
    ("advantage", "counts_failures"): ("a failed sample has an advantage",),
    ("advantage", "is_not_finite"): ("are [inf",),
    ("advantage", "looks_at_places"): ("another order",),
    ("advantage", "looks_at_the_first_group"): ("the same groups in another order",),
    ("advantage", "is_too_short"): ("shape (1,) for 4 samples",),
    ("advantage", "is_0"): ("every advantage is 0",),
}


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of parts, in which the job is started."""
    (tmp_path / "my_parts.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def with_loss(config: Config, **loss: Any) -> Config:
    learner = msgspec.structs.replace(config.learner, loss=msgspec.structs.replace(config.learner.loss, **loss))
    return msgspec.structs.replace(config, learner=learner)


# ---------------------------------------------------------------- what passes


def test_the_examples_of_every_kind_pass(make_config: Any) -> None:
    config = with_loss(make_config(), **EXAMPLES)
    assert set(plugins(config)) == {f"learner.loss.{key}" for key in EXAMPLES if not key.endswith("options")}
    check(config)


def test_the_example_of_the_page_passes(make_config: Any, beside: Path) -> None:
    page = (ROOT / "docs" / "losses.md").read_text()
    code, keys = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("python", "yaml"))
    (beside / "my_loss.py").write_text(code)
    config = with_loss(make_config(), **yaml.safe_load(keys)["learner"]["loss"])
    assert list(loss_problems(config.learner.loss)) == []
    check(config)


@pytest.mark.parametrize("name", sorted(OBJECTIVES.keys() - set(MARKING)))
def test_our_objectives_pass(name: str) -> None:
    check_loss("objective", loss_config("objective", name, LossConfig()))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, known in (("kl_estimator", KL_ESTIMATORS), ("reduction", REDUCTIONS)) for name in known],
)
def test_our_estimators_and_reductions_pass(kind: str, name: str) -> None:
    check_loss(kind, loss_config(kind, name, LossConfig()))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_our_corrections_pass(name: str) -> None:
    check_loss("correction", loss_config("correction", name, LossConfig()))


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae"}))  # gae's come from a critic
def test_our_advantages_pass(name: str) -> None:
    options = {"pass_at_k": {"k": 2}, "gdpo": {"right": 1.0, "abcd": 0.5}}.get(name, {})
    check_advantage(part("advantage", name, ADVANTAGES, options))


@pytest.mark.parametrize("config", [c for c in GRID[::23] + EXTRAS if c.objective not in MARKING], ids=describe)
def test_a_part_by_its_import_path_is_the_part_by_its_name(config: LossConfig) -> None:
    """With its bounds written out, since those of an import path are ppo_clip's."""
    paths: dict[str, Any] = {
        "objective": f"learner.loss.objectives:{config.objective}",
        "correction": f"learner.loss.corrections:{config.correction}",
        "reduction": f"learner.loss.losses:{config.reduction}",
        "kl_estimator": f"learner.loss.losses:{config.kl_estimator}",
    }
    paths |= dict(zip(("clip_low", "clip_high"), clip_bounds(config), strict=True))
    if (config.correction, config.correction_level) in CORRECTION_BOUNDS:
        paths |= dict(zip(("correction_low", "correction_cap"), correction_bounds(config), strict=True))
    logprobs, entropy = (torch.tensor(x, dtype=torch.float64) for x in (CASE.logprobs, CASE.entropy))
    both = (config, msgspec.structs.replace(config, **paths))
    found, expected = (policy_loss(each, MAX_TOKENS)(logprobs, entropy, CASE.microbatch()) for each in both)
    assert torch.equal(found.loss_sum, expected.loss_sum)
    assert found.denominator is not None and expected.denominator is not None
    assert torch.equal(found.denominator, expected.denominator)


def test_a_job_trains_with_the_examples(make_world: MakeWorld) -> None:
    world = make_world(learner={"groups_per_step": 2, "checkpoint": {"every": 2}, "loss": EXAMPLES})
    assert world.run() == "done"
    assert all(math.isfinite(line.loss) for line in world.lines()) and len(world.lines()) == 4


def test_an_estimator_sees_rewards_by_name_lengths_and_what_a_success_is(
    make_config: Any, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (beside / "my_estimator.py").write_text(
        "SEEN = []\n"
        "def note(groups, *, factor):\n"
        "    SEEN.extend(groups)\n"
        "    return [group.totals * factor for group in groups]\n"
    )
    config = with_loss(make_config(), advantage="my_estimator:note", advantage_options={"factor": 3.0})
    tasks = msgspec.structs.replace(config.tasks, success=0.5)
    config = msgspec.structs.replace(config, tasks=tasks)
    samples = [
        sample(2, [(3, 0)], reward=1.0, metrics={"right": 1.0}),
        sample(2, [(2, 0)], reward=0.5, metrics={"right": 0.0, "short": 0.5}),
        sample(reward=9.0, error="gone", metrics={"right": 7.0}),
    ]
    batch = assemble([Group(0, samples)], 0, config)
    (seen,) = importlib.import_module("my_estimator").SEEN
    monkeypatch.delitem(sys.modules, "my_estimator")
    assert [document.advantage for document in batch.documents] == [3.0, 1.5]
    assert seen.lengths.tolist() == [3, 2, 0] and seen.success == 0.5
    assert seen.totals.tolist()[:2] == [1.0, 0.5] and math.isnan(seen.totals[2])
    assert {name: part.tolist()[:2] for name, part in seen.parts.items()}["right"] == [1.0, 0.0]
    assert math.isnan(seen.parts["short"][0]) and math.isnan(seen.parts["right"][2])


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize(("kind", "name"), MISTAKES)
def test_a_mistake_is_found_by_its_key_with_what_is_wrong(make_config: Any, beside: Path, kind: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(with_loss(make_config(), **{kind: f"my_parts:{name}"}), "job.yaml")
    error = caught.value
    assert (error.file, error.key, error.exit_code) == ("job.yaml", f"learner.loss.{kind}", 2)
    assert [fact for fact in MISTAKES[kind, name] if fact not in error.found] == [], error.found


def test_a_wrong_normaliser_is_told_with_both_numbers(make_config: Any, beside: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check(with_loss(make_config(), objective="my_parts:divides_by_tokens"))
    one, other = map(float, re.findall(r"-?\d+\.\d+", caught.value.found)[:2])
    whole = plugin_check.trial()
    values = (whole.logprobs - whole.batch.behavior_logprobs).exp() * whole.batch.advantages * whole.batch.loss_mask
    lengths = torch.tensor(whole.batch.document_lengths)
    tokens = whole.batch.loss_mask.sum()
    assert one == pytest.approx(-(values.sum() / len(values) / tokens).item(), rel=1e-6)
    each = values / lengths.repeat_interleave(lengths)
    assert other == pytest.approx(-(each.sum() / tokens).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "key", "hint"),
    [
        ({"objective": "examples.loss_parts:topr", "objective_options": {"mots": 1.0}}, "objective_options", "most"),
        ({"objective": "examples.loss_parts:tpor"}, "objective", "topr"),
        ({"objective": "no_such_module:topr"}, "objective", "no_such_module.py"),
        ({"advantage": "examples.loss_parts:over_median", "advantage_options": {"k": 1}}, "advantage_options", "scale"),
    ],
)
def test_a_misspelled_option_or_name_is_told_with_the_nearest(
    make_config: Any, loss: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(with_loss(make_config(), **loss))
    assert caught.value.key == f"learner.loss.{key}"
    assert hint in (caught.value.hint or "")


def test_options_of_a_source_are_checked_with_the_estimator_that_it_inherits(make_config: Any) -> None:
    def job(options: dict[str, float]) -> Config:
        source = {"environment": "addition", "dataset": "unset"}
        sources = {"a": source, "b": source | {"advantage_options": options}}
        tasks = {"sources": sources, "environment": None, "dataset": ""}
        return with_loss(make_config(tasks=tasks), advantage="examples.loss_parts:over_median")

    check(job({"scale": 2.0}))
    for options, key in (({"scael": 2.0}, "advantage_options"), ({"scale": 0.0}, "advantage")):
        with pytest.raises(ConfigError) as caught:
            check(job(options))
        assert caught.value.key == f"tasks.sources.b.{key}"


def test_differences_are_taken_with_what_has_no_gradient_as_it_was() -> None:
    """A value that is detached, read as a number or computed without gradients is a constant of the formula."""
    x = torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True)

    def value(y: Tensor) -> Tensor:
        with torch.no_grad():
            weight = y.sin()
        largest = y.max().item()
        kept = y.detach()
        kept.mul_(3.0)
        return (y * weight + y * kept + y.square() * largest).sum()

    fixed = Fixed()
    with fixed:
        total = value(x)
    expected = torch.autograd.grad(total, x)[0]
    for place in range(2):
        found = []
        for step in (1e-6, -1e-6):
            moved = x.detach().clone()
            moved[place] += step
            moved.requires_grad_()
            with fixed.again():
                moved_value = value(moved)
            found.append(moved_value.item())
        assert (found[0] - found[1]) / 2e-6 == pytest.approx(expected[place].item(), rel=1e-6)


# ---------------------------------------------------------------- in a process of its own


@pytest.mark.slow
def test_the_check_of_a_job_runs_beside_it_and_only_where_a_part_is_named(make_config: Any, beside: Path) -> None:
    (beside / "loud.py").write_text("print('hello')\nfrom my_parts import divides_by_tokens\n")
    assert ask(make_config()) == []
    (found,) = ask(with_loss(make_config(), objective="loud:divides_by_tokens"))
    assert found.key == "learner.loss.objective" and "microbatch" in found.found
    (beside / "dies.py").write_text("import os\nos._exit(7)\n")
    (found,) = ask(with_loss(make_config(), objective="dies:early"))
    assert "7" in found.found


@pytest.mark.slow
def test_a_learner_that_starts_with_a_wrong_part_ends_with_code_2(make_config: Any, beside: Path) -> None:
    model_folder(beside / "model")
    config = make_config(
        model={"path": str(beside / "model")}, rollout={"max_tokens": 100, "engine": {"max_model_len": 512}}
    )
    (beside / "job.yaml").write_text(dump_yaml(config))
    words = ["--config", "job.yaml", "learner.loss.objective=my_parts:divides_by_tokens"]
    done = subprocess.run(
        [sys.executable, "-m", "learner.main", *words],
        capture_output=True, text=True, timeout=LIMIT_S, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "learner.loss.objective" in done.stderr and "divide" in done.stderr
