"""`slipstream plan`: every named config is planned, every failing check is listed, and nothing heavy is imported."""

import json
import shutil
from argparse import Namespace
from pathlib import Path
from typing import get_args

import pytest

from common.config.schema import Config, ParallelConfig
from common.errors import Problem, UsageError
from launch.checks.findings import Finding
from launch.checks.findings import refusal as finding_of
from launch.checks.plan import WIDTH, as_json, command, page
from launch.checks.review import make_review
from launch.cli import main
from launch.plan.job_plan import GIB
from launch.plan.memory import DEVICES, Entropy, fits, output_bytes
from tests.rigs.configs import refusal, text_of, write_job
from tests.rigs.processes import ROOT
from tests.rigs.refusals import refused

NAMED = {
    "qwen3-0.6b-gsm8k": dict(world=4, tensor=1, pipeline=1, context=1, expert=1),
    "qwen3-0.6b-1gpu": dict(world=1, tensor=1, pipeline=1, context=1, expert=1),
    "qwen3-1.7b-1gpu": dict(world=1, tensor=1, pipeline=1, context=1, expert=1),
    "qwen3-4b-2gpu": dict(world=1, tensor=1, pipeline=1, context=1, expert=1),
    "qwen3-8b-3gpu": dict(world=2, tensor=2, pipeline=1, context=1, expert=1),
    "qwen3-30b-a3b-9gpu": dict(world=8, tensor=1, pipeline=1, context=1, expert=8),
    "llama-3.1-70b-lora-4gpu": dict(world=2, tensor=2, pipeline=1, context=1, expert=1),
    "llama-3.1-70b": dict(world=16, tensor=8, pipeline=2, context=1, expert=1),
    "llama-3.1-405b": dict(world=256, tensor=8, pipeline=16, context=2, expert=1),
    "deepseek-v3": dict(world=512, tensor=1, pipeline=16, context=1, expert=32),
    "qwen3-235b-a22b": dict(world=64, tensor=4, pipeline=8, context=1, expert=4),
    "mixtral-8x7b": dict(world=16, tensor=2, pipeline=2, context=1, expert=4),
}
TUNED = ("deepseek-v3", "qwen3-235b-a22b", "mixtral-8x7b")
CLIPS = ["learner.loss.clip_low=0.2", "learner.loss.clip_dual=3"]
QWEN = "Qwen/Qwen3-0.6B"
DATA = ["tasks.dataset=data/gsm8k/train.jsonl", "evaluation.datasets=[data/gsm8k/test.jsonl]"]
LARGER = [  # a config, another model for it, a part of what is proposed
    ("qwen3-0.6b-gsm8k", "Qwen3-4B", ["learner.parallel.tensor=2"]),
    ("qwen3-0.6b-gsm8k", "Qwen3-8B", ["learner.parallel.tensor=4", "weights.buffers=host"]),
    ("qwen3-0.6b-1gpu", "Qwen3-8B", ["learner.world_size=2"]),
    ("qwen3-1.7b-1gpu", "Qwen3-4B", ["learner.memory.offload_optimizer=true"]),
    ("llama-3.1-70b", "Llama-3.1-70B", ["learner.world_size=32", "learner.machines=4"]),
    ("qwen3-235b-a22b", "Qwen3-235B-A22B", ["learner.parallel.expert=8"]),
    ("qwen3-235b-a22b-sft", "Qwen3-235B-A22B", ["learner.parallel.expert=8"]),
    ("mixtral-8x7b", "Qwen3-235B-A22B", ["learner.machines=8"]),
]
ALL = [*NAMED, *(f"{name}-sft" for name in TUNED)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's configs alone, without weights or data that a person may have put there."""
    for file in (ROOT / "configs").rglob("*"):
        if file.suffix == ".yaml" or file.name == "config.json":
            target = tmp_path / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    for size in ("0.6B", "1.7B", "4B", "8B", "30B-A3B"):  # a folder wins over the hub
        shutil.copytree(tmp_path / "configs" / "models" / f"Qwen3-{size}", tmp_path / "Qwen" / f"Qwen3-{size}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ALL)
def test_every_named_config_passes_its_checks_and_fits(here: Path, name: str) -> None:
    review = make_review(f"configs/{name}.yaml", [])
    assert review.failed == []
    assert review.plan is not None
    sizes = review.plan.sizes
    layout = NAMED[name.removesuffix("-sft")]
    assert {axis: getattr(sizes, axis) for axis in layout} == layout
    assert "141 GB is enough" in " ".join(text_of(page(review), WIDTH).split())
    assert any("weights" in line for line in review.before_launch)
    layers = [n for stage in review.plan.stages for a, b in stage.layers for n in range(a, b)]
    assert layers == list(range(review.plan.model.layers)), "uneven stages have every layer once"
    for kind in review.plan.groups:
        assert sorted(rank for group in kind.groups for rank in group) == list(range(layout["world"])), kind.name


def test_every_config_passes_with_a_model_in_its_place(here: Path) -> None:
    files = sorted(Path("configs").glob("*.yaml"))
    assert {file.stem for file in files} >= set(ALL)
    for file in files:
        assert make_review(str(file), [] if file.stem in ALL else [f"model.path={QWEN}"]).failed == [], file


def test_the_configs_of_one_model_each_have_the_fewest_80_gb_cards_and_nccl_where_it_may_be(here: Path) -> None:
    for name in ("qwen3-0.6b-1gpu", "qwen3-1.7b-1gpu", "qwen3-4b-2gpu", "qwen3-8b-3gpu"):
        review = make_review(f"configs/{name}.yaml", [])
        config, plan, cards = review.config, review.plan, int(name[-4])
        assert isinstance(config, Config) and plan is not None and plan.rl is not None
        engine, settings, card = plan.rl.engine, config.rollout.engine, DEVICES["80 GB"]
        assert fits(plan.fullest.peak, card)
        assert engine.cache_tokens(card, settings.gpu_memory_utilization) > 100 * settings.max_model_len
        said = " ".join(text_of(page(review), WIDTH).split())
        assert ("with --share-gpus" in said and "one GPU of 80 GB" in said) == (cards == 1)
        if cards > 1:
            assert config.devices == cards
            assert config.weights.transport == "nccl"
            least = plan.parameters * 18 + engine.weight_bytes  # sharded perfectly, and nothing else
            assert not fits(least / (cards - 1), card), "they fit fewer"
    first = make_review("configs/qwen3-0.6b-gsm8k.yaml", []).config
    assert isinstance(first, Config) and (first.weights.transport, first.weights.buffers) == ("nccl", "device")


def test_30b_and_70b_have_the_fewest_80_gb_cards(here: Path) -> None:
    """Every card of a role has an equal part at best, and the roles share none."""
    for name in ("qwen3-30b-a3b-9gpu", "llama-3.1-70b-lora-4gpu"):
        review = make_review(f"configs/{name}.yaml", [])
        config, plan, cards, card = review.config, review.plan, int(name[-4]), DEVICES["80 GB"]
        assert isinstance(config, Config) and plan is not None and plan.rl is not None
        engine, settings = plan.rl.engine, config.rollout.engine
        assert fits(plan.fullest.peak, card) and config.devices == cards
        cache = engine.cache_tokens(card, settings.gpu_memory_utilization)
        assert cache > settings.max_num_seqs * settings.max_model_len
        states = plan.parameters * (2 if config.learner.lora else 18)
        assert not fits(states / (config.learner.world_size - 1), card), "the learner fits fewer"
        ranks = settings.tensor_parallel
        assert ranks == 1 or not fits(engine.weight_bytes * ranks / (ranks - 1), card), "the engine fits fewer"


@pytest.mark.parametrize(("name", "model", "words"), LARGER)
def test_a_layout_that_does_not_fit_gets_a_proposal_that_does(
    here: Path, name: str, model: str, words: list[str]
) -> None:
    given = [f"model.path=configs/models/{model}"]
    before = make_review(f"configs/{name}.yaml", given)
    assert before.plan is not None and before.proposal is not None
    proposed = before.proposal
    assert set(words) <= set(proposed.overrides), proposed
    said = next(remark.what for remark in before.remarks if remark.code == "too_small")
    assert " ".join(proposed.overrides) in said and f"{proposed.peak / GIB:.1f} GiB" in said
    after = make_review(f"configs/{name}.yaml", [*given, *proposed.overrides])
    assert after.plan is not None and after.plan.fullest.peak == proposed.peak < before.plan.fullest.peak
    assert fits(proposed.peak, DEVICES[proposed.device])
    assert not fits(before.plan.fullest.peak, DEVICES[proposed.device])
    assert after.failed == before.failed == []


def test_adapters_need_gradients_states_and_checkpoints_of_their_own_alone(here: Path) -> None:
    words = ["learner.loss.kl_coefficient=0.1"]
    whole, adapted, other = (
        make_review("configs/qwen3-8b-3gpu.yaml", [*words, *more])
        for more in ([], ["learner.lora.rank=8"], ["learner.lora.rank=8", "learner.loss.reference=Qwen/Qwen3-8B"])
    )
    assert whole.plan is not None and adapted.plan is not None and other.plan is not None
    assert whole.plan.rl is not None and adapted.plan.rl is not None
    (before,), (after,), (named,) = (review.plan.stages for review in (whole, adapted, other) if review.plan)
    assert (whole.plan.adapters, adapted.plan.adapters) == (0, 18_284_544)
    assert adapted.plan.parameters == whole.plan.parameters
    assert adapted.plan.checkpoint.bytes == 18_284_544 * (2 + 4 + 8)
    assert adapted.plan.rl.publish.bytes == whole.plan.rl.publish.bytes, "merged weights travel"
    assert after.resident.gradients < 0.01 * before.resident.gradients
    assert before.host - named.host > before.resident.optimizer * 0.9  # that of the states
    assert named.host - after.host == after.resident.parameters, "the weights beneath are the reference"
    assert after.peak < before.peak
    said = " ".join(text_of(page(adapted), WIDTH).split())
    assert "adapters 18.3 M of rank 8 train, 0.22% of the parameters" in said
    assert "checkpoints 0.2 GiB" in said
    words = ["learner.lora.rank=8", "weights.encoding=adapter"]
    wrong = make_review("configs/qwen3-8b-3gpu.yaml", [*words, "learner.lora.targets=[q_proj]"])
    assert "part of 'linear_qkv'" in str(wrong.failed)
    sent = make_review("configs/qwen3-8b-3gpu.yaml", words)
    assert sent.plan is not None and sent.plan.rl is not None
    assert (adapted.plan.rl.publish.adapter_bytes, sent.plan.rl.publish.adapter_bytes) == (0, 43_646_976)
    said = " ".join(text_of(page(sent), WIDTH).split())
    assert "every step, 42 MiB of adapters; the first, and to a node that joins, 15.3 GiB" in said
    assert "sources 1, the largest sends 42 MiB of adapters;" in said


@pytest.mark.parametrize(
    ("name", "words", "entropy"),
    [
        ("llama-3.1-70b", [], "measured"),
        ("llama-3.1-70b", ["learner.loss.entropy_coefficient=0.1"], "trained"),
        ("mixtral-8x7b-sft", [], "none"),
    ],
)
def test_the_output_layer_needs_memory_for_the_entropy(here: Path, name: str, words: list[str], entropy: str) -> None:
    plan = make_review(f"configs/{name}.yaml", [*words, "learner.micro_batch_tokens=65536"]).plan
    assert plan is not None
    parallel = ParallelConfig(tensor=plan.sizes.tensor)
    needed = {each: output_bytes(plan.model, parallel, 65536, 2, entropy=each) for each in get_args(Entropy)}
    assert plan.stages[-1].activations.output == needed[entropy]
    assert needed["none"] <= needed["measured"] < needed["trained"]


def test_a_critic_needs_memory_and_checkpoints_of_its_own(here: Path) -> None:
    here_all = ["learner.memory.offload_optimizer=false"]
    away = ["learner.memory.offload_optimizer=true", "learner.memory.offload_parameters=true"]
    gae = ["learner.critic={}", "learner.loss.advantage=gae"]
    cases = [[*words, *memory] for words in ([], gae) for memory in (here_all, away)]
    found = [make_review("configs/qwen3-8b-3gpu.yaml", case) for case in cases]
    plans = [review.plan for review in found]
    (alone,), (moved,), (beside,), (both_moved,) = (plan.stages for plan in plans if plan is not None)
    r = alone.resident
    assert alone.critic == 0 and beside.critic == r.parameters + r.gradients + r.optimizer
    assert beside.training - alone.training == beside.updating - alone.updating == beside.critic
    assert both_moved.critic == r.gradients and both_moved.host == 2 * moved.host
    assert plans[2] is not None and plans[0] is not None
    assert plans[2].checkpoint.bytes == 2 * plans[0].checkpoint.bytes
    said = " ".join(text_of(page(found[2]), WIDTH).split())
    assert "critic as many parameters beside the policy" in said


def test_where_no_layout_fits_the_page_says_so(here: Path) -> None:
    review = make_review("configs/qwen3-0.6b-gsm8k.yaml", ["model.path=configs/models/Llama-3.1-70B"])
    assert review.proposal is None
    assert "memory too_small" in codes(review.remarks)


def test_versions_in_device_memory_count_on_the_lead_and_offloading_on_the_ranks_that_there_are(here: Path) -> None:
    device, host = (make_review("configs/qwen3-0.6b-gsm8k.yaml", [f"weights.buffers={b}"]) for b in ("device", "host"))
    assert device.plan is not None and host.plan is not None and host.plan.rl is not None
    assert device.plan.fullest.peak - host.plan.fullest.peak == 3 * host.plan.rl.publish.bytes
    (host,) = [remark for remark in make_review("configs/qwen3-4b-2gpu.yaml", []).remarks if remark.code == "host"]
    assert "45 GiB" in host.what


@pytest.mark.parametrize(
    ("word", "gpus"),  # the override, and GPUs of a machine that may start it; 0: none may
    [("rollout.engine.tensor_parallel=16", 16), ("learner.machines=32", 16), ("rollout.engine.tensor_parallel=4", 0)],
)
def test_what_no_machine_of_eight_gpus_can_start_is_refused(here: Path, word: str, gpus: int) -> None:
    (refused,) = make_review("configs/deepseek-v3.yaml", [word]).refused
    assert refused.key == word.partition("=")[0]
    if gpus:
        assert make_review("configs/deepseek-v3.yaml", [word], gpus_per_node=gpus).refused == []


@pytest.mark.parametrize(
    "words",
    [
        ["learner.world_size=9007199254740992"],
        ["learner.lora={rank: 9007199254740992}"],
        ["learner.groups_per_step=9007199254740992"],
        ["rollout.group_size=9007199254740992"],
        ["rollout.nodes=9007199254740992"],
        ["learner.machines=2", "learner.world_size=2", "broker.address=nowhere"],
        ["broker.address=[]"],
    ],
)
def test_what_a_check_refuses_stops_no_plan_with_a_traceback(here: Path, words: list[str]) -> None:
    review = make_review("configs/qwen3-0.6b-1gpu.yaml", words)
    assert words[-1].partition("=")[0] in str(review.refused[0].key)
    assert as_json(review)["ok"] is False and text_of(page(review), WIDTH)


def test_all_failing_checks_are_listed_and_the_exit_code_is_2(here: Path, capsys) -> None:
    words = ["tasks.environment=gsm9k", "broker.lease_s=1", "rollout.group_size=1", "learner.parallel.pipeline=4"]
    words += ["learner.parallel.virtual_pipeline=3"]
    assert main(["plan", "configs/mixtral-8x7b.yaml", *words]) == 2
    out = capsys.readouterr().out
    for key in ("tasks.environment", "broker.lease_s", "rollout.group_size", "learner.parallel.virtual_pipeline"):
        assert f"{key}: expected" in out
    assert "built-in: 'gsm8k'" in out
    assert "No plan:" in out
    assert "Process groups" not in out
    # a check that leaves the layout alone still gives the plan
    assert main(["plan", "configs/llama-3.1-70b.yaml", "broker.lease_s=1"]) == 2
    out = capsys.readouterr().out
    assert "broker.lease_s: expected" in out
    assert "Process groups" in out


def test_a_config_that_passes_exits_with_0_and_machine_readable(here: Path, capsys) -> None:
    assert main(["plan", "configs/qwen3-0.6b-gsm8k.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["plan"]["parameters"] == 596_049_920
    assert found["plan"]["groups"][3]["groups"] == [[0, 1, 2, 3]]
    assert found["plan"]["stages"][0]["peak"] > found["plan"]["stages"][0]["resident"]["parameters"]
    assert len(found["before_launch"]) == 2, "the hub's dataset is not missing"
    several = make_review("configs/qwen3-0.6b-gsm8k.yaml", ["rollout.nodes=5", "rollout.engine.tensor_parallel=2"])
    assert "loopback" not in str(found) and codes(several.not_yet) == ["launch loopback_weights"]
    assert isinstance(several.config, Config) and several.config.devices == sum(several.config.device_shares.values())
    assert f"{4 + 5 * 2} devices of learner and" in several.not_yet[0].what
    assert make_review("configs/qwen3-235b-a22b-sft.yaml", []).config.devices == 64


def ask(link: str | None, json: bool = True) -> int:
    given = {} if link is None else {"link": float(link)}
    name = "configs/qwen3-235b-a22b.yaml"
    return command(Namespace(config=name, overrides=[], gpus_per_node=8, json=json, **{"link": 100.0, **given}))


def test_a_slower_link_makes_a_publish_longer_on_the_page_in_json_and_in_the_remarks(here: Path, capsys) -> None:
    assert ask(None) == 0
    fast = json.loads(capsys.readouterr().out)
    publish = fast["plan"]["rl"]["publish"]
    assert (publish["sources"], publish["link_gbit"]) == (32, 100)
    assert "weights.timeout_s" not in str(fast["remarks"])
    assert ask("0.5") == 0
    slow = json.loads(capsys.readouterr().out)
    assert slow["plan"]["rl"]["publish"]["publish_s"] == pytest.approx(200 * publish["publish_s"])
    assert slow["plan"]["rl"]["publish"]["send_s"] == pytest.approx(200 * publish["send_s"])
    took = f"{slow['plan']['rl']['publish']['publish_s']:,.0f} s"
    for figure in ("0.5 Gb/s", took, "weights.timeout_s"):
        assert figure in str(slow["remarks"])
    assert ask("25", json=False) == 0
    flat = " ".join(capsys.readouterr().out.split())
    for figure in ("sources 32", "15.1 GiB", "25 Gb/s"):
        assert figure in flat


@pytest.mark.parametrize("link", ["0", "-1", "nan", "inf"])
def test_a_link_that_carries_nothing_is_refused(here: Path, link: str) -> None:
    with refused(UsageError, "--link", f"found {link}"):
        ask(link)


@pytest.mark.parametrize("gpus", ["0", "-8"])
def test_machines_without_gpus_are_refused(here: Path, capsys, gpus: str) -> None:
    said = refusal(capsys, "plan", "configs/qwen3-0.6b-1gpu.yaml", "--gpus-per-node", gpus)
    assert f"--gpus-per-node: expected the GPUs of a machine, at least 1, found {gpus}" in said


def test_missing_files_are_brought_before_launch_but_a_bad_dataset_fails(here: Path) -> None:
    (here / "data" / "gsm8k").mkdir(parents=True)
    (here / "data" / "gsm8k" / "train.jsonl").write_text("not json\n")
    review = make_review("configs/qwen3-0.6b-gsm8k.yaml", DATA)
    assert [problem.key for problem in review.refused] == ["tasks.dataset"]
    assert "evaluation.datasets" in [problem.key for problem in review.missing]
    model = here / QWEN
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    for name in ("train", "test"):
        (here / "data" / "gsm8k" / f"{name}.jsonl").write_text('{"question": "?", "answer": "#### 1"}\n')
    review = make_review("configs/qwen3-0.6b-gsm8k.yaml", DATA)
    assert (review.failed, review.before_launch) == ([], [])


def test_without_a_config_json_that_can_be_counted_there_is_nothing_to_plan_from(here: Path, capsys) -> None:
    said = refusal(capsys, "plan", "configs/mixtral-8x7b.yaml", "model.path=nowhere")
    assert "config.json" in said and "launch/quickstart.sh" in said
    file = here / QWEN / "config.json"
    for content, reason in (
        (
            file.read_text().replace('"qwen3"', '"gpt2"').replace('"Qwen3ForCausalLM"', ""),
            "the planner counts qwen2, qwen3, llama",
        ),
        ("[]", "cannot be read: Expected `object`, got `array`"),
    ):
        file.write_text(content)
        assert reason in refusal(capsys, "plan", "configs/qwen3-0.6b-gsm8k.yaml")


def test_offloaded_bytes_leave_the_device_where_they_are_not_in_use(here: Path) -> None:
    full = make_review("configs/deepseek-v3.yaml", []).plan
    words = [f"learner.memory.offload_{what}=false" for what in ("optimizer", "gradients", "parameters")]
    kept = make_review("configs/deepseek-v3.yaml", words).plan
    assert full is not None and kept is not None
    for away, here_ in zip(full.stages, kept.stages, strict=True):
        held = here_.resident
        assert here_.training - away.training == held.optimizer
        assert here_.updating == away.updating == held.parameters + held.gradients + held.optimizer
        assert (here_.waiting, away.waiting) == (here_.updating, 0)
        assert (here_.host, away.host) == (0, held.parameters + held.optimizer)


BEHAVIOR = ["learner.loss.clip_high=0.28", "learner.loss.proximal=behavior", "learner.loss.correction=none"]
DEVICE = ["weights.buffers=device", "weights.transport=nccl", "weights.network=trusted"]
REMARKS = [  # a config, overrides, check and code of a remark
    ("deepseek-v3", [], "groups spans_nodes"),
    ("llama-3.1-70b", [], "groups unsharded"),
    ("llama-3.1-405b", ["learner.groups_per_step=1"], "pipeline idles"),
    ("qwen3-235b-a22b", [], "publish host_buffers"),
    ("mixtral-8x7b", DEVICE, "publish device_buffers"),
    ("mixtral-8x7b", ["rollout.engine.tensor_parallel=1"], "engines little_cache"),
    ("mixtral-8x7b", ["broker.max_bytes=1000000", "broker.max_message_bytes=1000000"], "window broker_full"),
    ("mixtral-8x7b", ["broker.max_message_bytes=1000000"], "window group_too_large"),
    ("mixtral-8x7b", ["learner.moe.freeze_router=false"], "experts unbalanced"),
    ("mixtral-8x7b", ["learner.memory.recompute=selective"], "memory selective"),
    ("mixtral-8x7b", ["learner.world_size=8"], "memory too_small"),
    ("mixtral-8x7b", CLIPS, "loss never_clips"),
    ("mixtral-8x7b", ["learner.optimizer={schedule: constant, decay_steps: 9}"], "config no_effect"),
    ("llama-3.1-405b", ["model.dtype=float32"], "groups float32_context"),
]
SILENCE = [
    ("llama-3.1-405b", [], "groups float32_context"),
    ("llama-3.1-70b", ["learner.world_size=32", "learner.parallel.tensor=8"], "groups unsharded"),
    ("mixtral-8x7b", [], "loss never_clips"),
    ("mixtral-8x7b", BEHAVIOR, "loss never_clips"),
    ("mixtral-8x7b", [*CLIPS, "learner.minibatches=2"], "loss never_clips"),
]


def codes(findings: list[Finding]) -> list[str]:
    return [f"{finding.check} {finding.code}" for finding in findings]


@pytest.mark.parametrize(
    ("name", "words", "remark", "made"), [*((*row, True) for row in REMARKS), *((*row, False) for row in SILENCE)]
)
def test_remarks_say_what_no_check_refuses_and_nothing_where_all_is_well(
    here: Path, name: str, words: list[str], remark: str, made: bool
) -> None:
    found = codes(make_review(f"configs/{name}.yaml", words).remarks)
    assert (remark in found) == made, found


def test_the_page_is_within_its_width_says_everything_that_json_says_and_is_documented_as_it_is(here: Path) -> None:
    review = make_review("configs/deepseek-v3.yaml", [])
    text = text_of(page(review), WIDTH)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "671.03 B" in text and "37.55 B" in text
    flat = " ".join(text.split())
    said = as_json(review)
    for line in [*said["failed"], *said["before_launch"], *said["remarks"]]:
        assert " ".join(line.split()) in flat
    documented = (ROOT / "docs" / "plan.md").read_text()
    shown = make_review("configs/mixtral-8x7b.yaml", [])
    shown.standing = None  # it has a date
    lines = [line.rstrip() for line in text_of(page(shown), WIDTH).splitlines()]
    _, _, example = documented.partition("<!-- example -->\n```\n")
    assert example.partition("\n```\n")[0].split("\n") == lines  # else paste the command's output there


@pytest.mark.parametrize(("tensor", "pays"), [(1, False), (2, True)])
def test_the_page_says_where_converting_does_not_pay(here: Path, tensor: int, pays: bool) -> None:
    words = ["learner.world_size=2", f"learner.parallel.tensor={tensor}"]
    text = text_of(page(make_review("configs/qwen3-0.6b-gsm8k.yaml", words)), 1_000)
    assert ("(`slipstream convert`)" in text, "(`slipstream convert` does not pay)" in text) == (pays, not pays)


@pytest.mark.parametrize("at", ["tasks", "tasks.sources.math"])
@pytest.mark.parametrize("key", ["environment", "reward[1].function", "options", "limits.python"])
def test_what_is_wrong_with_an_environment_is_said_of_it_whatever_source_has_it(at: str, key: str) -> None:
    found = finding_of(Problem(f"{at}.{key}", "another", "this"))
    assert (found.check, found.code) == ("environment", f"{at}.{key}")
    assert finding_of(Problem(f"{at}.dataset", "another", "this")).check == "config"


@pytest.mark.parametrize(
    ("rows", "key", "said"),
    [
        ('{"question": "?"}\n{"qustion": "?"}\n', "tasks.prompt", "line 2: there is no column 'question'"),
        ('{"question": "?"}\n{"question": \n', "tasks.dataset", "line 2 is not JSON"),
        ("question,answer\n?,2\n", "tasks.dataset", "train.csv, a CSV file"),
        ('{"question": "?"}\n', "", ""),
    ],
)
def test_the_first_rows_of_a_dataset_that_is_here_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: str, key: str, said: str
) -> None:
    (tmp_path / "train.csv").write_text(rows)
    tasks = {"environment": None, "reward": "exact_match", "prompt": "{question}"}
    file = write_job(tmp_path, tasks={**tasks, "dataset": str(tmp_path / "train.csv")})
    assert main(["plan", str(file), "--json"]) == (2 if key else 0)
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert [line.partition(":")[0] for line in failed] == [key] * bool(key)
    assert said in "".join(failed)
    words = [f"tasks.dataset={tmp_path / 'elsewhere.jsonl'}"]
    assert make_review(str(file), words).failed == [], "a plan needs no data"
