"""The keys that a certificate covers, its lapses, who says so, and the certificates that the repository ships."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from common.config.certificate import OF_CRITIC, Certificate, Check, covered, fold
from common.config.checks import resolve_paths
from common.config.loading import load_either
from common.config.parallel_layout import world_problems
from common.config.schema import LearnerConfig, ParallelConfig
from common.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from common.process.run_dir import RunDir
from common.process.versions import learner_digest, versions
from launch import certify
from launch.certificates import FOLDER, IN_RUN, first_line, place, read_model, standing
from launch.checks.doctor import check_certificate
from launch.checks.plan import as_json, page
from launch.checks.review import make_review
from launch.cli import main
from tests.rigs.configs import refusal, text_of, write_job
from tests.rigs.processes import ROOT

MOST_S = 300.0  # the longest that a certificate may take on two cores
SHIPPED = sorted((ROOT / "configs" / FOLDER).glob("*.json"))
PASSED = Check("gradients", "Hugging Face", 1e-6, 1e-5, "lm_head.weight")
FAILED = Check("one step", "one rank", float("nan"), 1e-2, "model.norm.weight")
FOLDS: dict[str, tuple[int, dict[str, Any], int, list[str]]] = {
    "one rank stays": (1, {}, 1, []),
    "data parallelism": (8, {}, 2, ["data 8 -> 2"]),
    "two kinds": (16, {"tensor": 8, "pipeline": 2}, 4, ["tensor 8 -> 2"]),
    "three kinds": (
        512, {"tensor": 8, "pipeline": 16, "context": 2}, 8, ["tensor 8 -> 2", "pipeline 16 -> 2", "data 2 -> 1"],
    ),
    "experts over data ranks": (
        512, {"pipeline": 16, "expert": 32}, 4, ["pipeline 16 -> 2", "expert 32 -> 2", "data 32 -> 2"],
    ),
    "experts over tensor ranks": (16, {"tensor": 2, "pipeline": 2, "expert": 4}, 4, ["expert 4 -> 2", "data 4 -> 1"]),
    "experts that need their ranks": (8, {"expert": 4, "expert_tensor": 2}, 4, ["expert 4 -> 2", "data 8 -> 4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDS)
def test_every_kind_of_parallelism_stays_with_two_ranks(name: str) -> None:
    world, sizes, ranks, said = FOLDS[name]
    learner = LearnerConfig(world_size=world, parallel=ParallelConfig(**sizes))
    found = fold(learner)
    assert (found.ranks, found.said) == (ranks, said)
    assert not [*world_problems(found.ranks, found.parallel)]
    assert [getattr(found.parallel, name) for name in sizes] == [min(2, size) for size in sizes.values()]


UNEVEN: dict[str, tuple[dict[str, int], int | None, list[str]]] = {
    "both ends": (
        {"first_stage_layers": 11, "last_stage_layers": 9},
        3, ["first_stage_layers 11 -> 3", "last_stage_layers 9 -> unset"],
    ),
    "the last alone": ({"last_stage_layers": 7}, 3, ["first_stage_layers unset -> 3", "last_stage_layers 7 -> unset"]),
    "the first, as the miniature's": ({"first_stage_layers": 3}, 3, []),
    "a virtual pipeline has even ones": (
        {"virtual_pipeline": 2, "last_stage_layers": 2}, None, ["last_stage_layers 2 -> unset"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_stages_stay_uneven_and_are_said(name: str) -> None:
    sizes, first, said = UNEVEN[name]
    found = fold(LearnerConfig(world_size=8, parallel=ParallelConfig(pipeline=8, **sizes)))
    assert (found.parallel.first_stage_layers, found.parallel.last_stage_layers) == (first, None)
    assert found.said == ["pipeline 8 -> 2", *said]


def certified(file: Path, **changes: Any) -> Certificate:
    """A certificate of the config in `file` by the code and the packages that are here, beside it."""
    config = resolve_paths(load_either(file))
    made = Certificate(
        config=file.stem,
        made="2026-11-27 03:00 UTC",
        commit="c0ffee",
        modified=False,
        versions=versions(),
        source=learner_digest(),
        covers=covered(config, read_model(Path(config.model.path))),
        folded=[],
        ranks=2,
        took_s=66.0,
        checks=[PASSED],
    )
    made = replace(made, **changes)
    place(file).parent.mkdir(exist_ok=True)
    place(file).write_bytes(msgspec.json.encode(made))
    return made


def sentence(file: Path, *overrides: str) -> str:
    return standing(resolve_paths(load_either(file, overrides)), file).sentence


def test_a_config_without_a_certificate_says_so_and_one_with_it_names_it(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    assert sentence(file).startswith(f"uncertified: {tmp_path / FOLDER / 'job.json'} does not exist")
    certified(file)
    assert sentence(file) == f"certified: 1 checks on 2 CPU ranks, 2026-11-27 03:00 UTC ({place(file)})"
    place(file).write_text("{")
    assert "cannot be read" in sentence(file)


LAPSES = {  # by the key that the reason names: an override
    "lora": "learner.lora={rank: 4}",
    "loss.objective": "learner.loss.objective=gspo",
    "several_updates": "learner.minibatches=2",
    "dtype": "model.dtype=float32",
    "layout.pipeline": "learner.parallel.pipeline=2",
    "memory.recompute": "learner.memory.recompute=full",
    "temperature": "rollout.temperature=0.7",
}


@pytest.mark.parametrize("key", LAPSES)
def test_it_lapses_when_a_key_that_it_covers_differs(tmp_path: Path, key: str) -> None:
    file = write_job(tmp_path, learner={"world_size": 4})
    certified(file)
    assert f"uncertified: {key} was " in sentence(file, LAPSES[key])


def test_it_lapses_when_a_source_gets_another_kl_term(tmp_path: Path) -> None:
    rows = {"environment": "addition", "dataset": str(tmp_path / "train.jsonl")}
    sources = {"sums": rows, "texts": rows | {"kl_coefficient": 0.05}}
    file = write_job(tmp_path, tasks={"environment": None, "dataset": "", "sources": sources})
    certified(file)
    assert sentence(file, "tasks.sources.sums.weight=2").startswith("certified")
    assert "kl_coefficients was " in sentence(file, "tasks.sources.texts.kl_coefficient=0.1")
    assert "kl_coefficients was " in sentence(file, "tasks.sources.sums.kl_coefficient=0.1")


def test_a_key_that_a_later_version_adds_lapses_nothing(tmp_path: Path) -> None:
    """Sections store what differs from the defaults."""
    file = write_job(tmp_path, learner={"lora": {"rank": 4}, "loss": {"objective": "gspo", "clip_low": 0.1}})
    covers = certified(file).covers
    assert covers["lora"] == {"rank": 4} and covers["loss"] == {"objective": "gspo", "clip_low": 0.1}
    assert (covers["moe"], covers["memory"], covers["layout"]) == ({}, {}, {"data": 1})


def test_it_lapses_with_versions_code_and_model_and_not_with_what_it_does_not_cover(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    certified(file, versions=versions() | {"slipstream": "0.0.1"})
    assert "uncertified: slipstream was 0.0.1 and now is" in sentence(file)
    certified(file, versions={name: f"{version}+cu130" for name, version in versions().items()})
    assert sentence(file).startswith("certified")
    certified(file, source="other")
    assert "the learner's code is not that of commit c0ffee any more" in sentence(file)
    certified(file)
    words = ("run.steps=7", "rollout.nodes=3", "learner.optimizer.lr=1e-3", "staleness.max=4", "run.seed=9")
    assert sentence(file, *words).startswith("certified")
    shape = tmp_path / "model" / "config.json"
    document = json.loads(shape.read_text())
    shape.write_text(json.dumps(document | {"transformers_version": "9", "dtype": "float32"}))
    assert sentence(file).startswith("certified")
    shape.write_text(json.dumps(document | {"num_attention_heads": 8}))
    assert "uncertified: model.num_attention_heads was 4 and now is 8" in sentence(file)


def test_a_job_says_it_first_or_is_refused(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    config = resolve_paths(load_either(file))
    assert first_line(config, str(file))[0].startswith("uncertified: ")
    strict = resolve_paths(load_either(file, ["model.uncertified=refuse"]))
    with pytest.raises(ConfigError) as refused:
        first_line(strict, str(file))
    assert (refused.value.key, refused.value.exit_code) == ("model.uncertified", 2)
    certified(file)
    assert first_line(strict, str(file))[0].startswith("certified: ")


@pytest.mark.parametrize("command", ["up", "learner"])
def test_commands_refuse_before_they_make_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = write_job(tmp_path)
    said = refusal(capsys, command, str(file), "model.uncertified=refuse")
    assert "model.uncertified: expected a job with a certificate" in said
    assert not (tmp_path / "run").exists()


def test_the_run_folder_has_the_certificate_that_its_roles_then_find(tmp_path: Path) -> None:
    file, run = write_job(tmp_path), RunDir(tmp_path / "run")
    certified(file)
    config = resolve_paths(load_either(file))
    run.prepare(config)
    standing(config, file).keep(run)
    assert standing(config, run.config).sentence.endswith(f"({run.path / IN_RUN})")
    standing(config, run.config).keep(run)
    assert (run.path / IN_RUN).is_file()
    place(file).unlink()
    standing(config, file).keep(run)
    assert not (run.path / IN_RUN).exists(), "a new run has none of an earlier start"


def test_a_run_that_has_begun_keeps_its_certificate_and_says_why_it_lapsed(tmp_path: Path) -> None:
    file, run = write_job(tmp_path), RunDir(tmp_path / "run")
    made = certified(file, source="the code that the run began with")
    config = resolve_paths(load_either(file))
    run.prepare(config)
    (run.path / IN_RUN).write_bytes(msgspec.json.encode(made))
    run.metrics.touch()
    for lost in (False, True):  # the certificate beside the config lapsed, too, or is gone
        if lost:
            place(file).unlink()
        standing(config, file).keep(run)
        assert msgspec.json.decode((run.path / IN_RUN).read_bytes(), type=Certificate) == made
        assert standing(config, run.config).sentence.startswith("uncertified: the learner's code is not that of commit")
    newer = certified(file)
    standing(config, file).keep(run)
    assert msgspec.json.decode((run.path / IN_RUN).read_bytes(), type=Certificate) == newer


def test_plan_and_doctor_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_job(tmp_path)
    review = make_review(str(file), [])
    assert "uncertified: " in text_of(page(review)) and not as_json(review)["certificate"]["counts"]
    assert [*check_certificate(review)] == [], "nobody asked for one"
    strict = "model.uncertified=refuse"
    (found,) = check_certificate(make_review(str(file), [strict]))
    assert (found.level, found.code, found.fix) == ("problem", "none", f"slipstream certify {file}")
    assert main(["plan", str(file), strict, "--json"]) == EXIT_USAGE
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert failed.startswith("model.uncertified: expected a job with a certificate")
    main(["doctor", str(file), strict, "--json"])
    codes = [each["code"] for each in json.loads(capsys.readouterr().out) if each["level"] == "problem"]
    assert codes.count("none") == 1 and "model.uncertified" not in codes, "doctor says it once"
    certified(file)
    assert main(["plan", str(file), strict]) == EXIT_DONE
    review = make_review(str(file), [])
    assert "certified: 1 checks" in text_of(page(review)) and as_json(review)["certificate"]["counts"]
    assert [found.level for found in check_certificate(review)] == ["fine"]
    lapsed = make_review(str(file), ["learner.lora={rank: 4}"])
    assert [(found.level, found.code) for found in check_certificate(lapsed)] == [("warning", "lapsed")]


REFUSED = {  # bad input: override, and what is said of it
    "a rank that tensor does not divide": ("learner.lora={rank: 3}", "learner.lora.rank: expected a multiple of"),
    "heads that tensor does not divide": ("learner.parallel.tensor=8", "learner.parallel.tensor: expected a divisor"),
    "no model": ("model.path=nowhere", "config.json does not exist"),
    "no key": ("learner.parallel.tensr=2", "did you mean 'tensor'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    word, said = REFUSED[name]
    file = write_job(tmp_path, learner={"world_size": 8, "parallel": {"tensor": 2}})
    assert said in refusal(capsys, "certify", str(file), word)


def test_a_certificate_counts_for_a_critic_only_with_checks_of_it(tmp_path: Path) -> None:
    file = write_job(tmp_path)
    words = ["learner.critic={}", "learner.loss.advantage=gae"]
    certified(file)
    assert "uncertified: loss.advantage was" in sentence(file, *words)
    config = resolve_paths(load_either(file, words))
    covers = covered(config, read_model(Path(config.model.path)))
    certified(file, covers=covers)
    assert "uncertified: it has no check of the critic; " in sentence(file, *words)
    certified(file, covers=covers, checks=[PASSED, replace(PASSED, name=OF_CRITIC + PASSED.name)])
    assert sentence(file, *words).startswith("certified: 2 checks")
    assert "critic.value_clip was" in sentence(file, *words, "learner.critic.value_clip=0.2")
    assert "certified" in sentence(file, *words, "learner.critic.gamma=0.9"), "advantages are not proven"


def test_a_failed_check_ends_with_exit_code_1_and_takes_the_old_certificate_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_job(tmp_path)
    monkeypatch.setattr(certify, "need_packages", lambda *roles: None)
    monkeypatch.setattr(certify, "prove", lambda *_: iter([PASSED]))
    assert main(["certify", str(file)]) == 0
    found = msgspec.json.decode(place(file).read_bytes(), type=Certificate)
    assert found.checks == [PASSED] and 0 <= found.took_s < MOST_S and sentence(file).startswith("certified")
    assert found.versions.keys() == {"slipstream", "torch", "megatron-core", "megatron-bridge", "transformers"}
    monkeypatch.setattr(certify, "prove", lambda *_: iter([PASSED, FAILED]))
    assert main(["certify", str(file)]) == 1
    assert "not proven: 1 of 2 checks failed" in capsys.readouterr().out
    assert not place(file).exists()


def test_a_check_names_difference_limit_and_tensor() -> None:
    said = "gradients against Hugging Face: difference 1.0e-06, limit 1.0e-05, at lm_head.weight"
    assert str(PASSED) == said and PASSED.passed and not FAILED.passed


@pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])
def test_a_certificate_of_the_repository_covers_its_config_as_it_is(file: Path) -> None:
    """Code and versions may have moved on; the first line of a job says it."""
    config = load_either(ROOT / "configs" / f"{file.stem}.yaml")
    found = msgspec.json.decode(file.read_bytes(), type=Certificate)
    assert found.config == file.stem and found.checks and all(one.passed for one in found.checks)
    assert found.took_s <= MOST_S
    now = covered(config, found.covers["model"])
    assert now == found.covers
    shape = ROOT / "configs" / "models" / config.model.path.rpartition("/")[2] / "config.json"
    if shape.is_file():
        assert covered(config, json.loads(shape.read_text()))["model"] == found.covers["model"]
