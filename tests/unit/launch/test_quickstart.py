"""The quickstart's model folder, datasets and demonstrations, and its refusal of overrides before they are made."""

import asyncio
import json
import os
import random
import shutil
import string
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from common.errors import EXIT_DONE, EXIT_USAGE
from launch.quickstart import assets
from launch.quickstart.assets import (
    AdditionPlan,
    GuessingPlan,
    addition_demonstration,
    addition_demonstrations,
    addition_pairs,
    addition_problem,
    guessing_demonstrations,
)
from rollout_fleet.environments.builtin.addition import Addition
from rollout_fleet.environments.builtin.number_guessing import NumberGuessing
from rollout_fleet.environments.protocol import Action
from tests.rigs.processes import ROOT

TEXTS = [string.printable[:95] + "\n", " a", "a ", "  two  spaces ", "\n\n x", "Q: 384+519=? A:", " 8+1+1=10 =903"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "assets"
    assert assets.build(out, 1, "tiny")
    return out


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_text_survives_the_tokenizer_character_by_character_and_special_tokens_have_their_ids(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    for text in (*TEXTS, *map(chr, range(32, 127)), "\n"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (128, 0, 1, 2)
    assert len({tokenizer.decode([i]) for i in range(128)}) == 128


def test_the_model_is_a_qwen3_of_the_presets_shape_with_tied_embeddings(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 0.30e6 < sum(p.numel() for p in model.parameters()) < 0.32e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.dtype.is_floating_point and model.dtype.itemsize == 4
    assert model.generation_config.eos_token_id == 1


def test_datasets_have_the_planned_rows_and_are_disjoint(folder: Path) -> None:
    train, held_out = rows(folder / "addition/train.jsonl"), rows(folder / "addition/held_out.jsonl")
    demonstrations = rows(folder / "addition/sft.jsonl")
    plan = assets.PRESETS["tiny"].addition
    assert (len(train), len(held_out), len(demonstrations)) == (4096, 512, plan.clean + plan.sloppy)
    asked = {f"Q: {row['question']}=? A:" for row in train}
    kept = {f"Q: {row['question']}=? A:" for row in held_out}
    assert (len(asked), len(kept)) == (4096, 512)
    assert not asked & kept
    assert not (asked | kept) & {row["prompt"] for row in demonstrations}
    assert len(rows(folder / "number_guessing/sft.jsonl")) == assets.PRESETS["tiny"].guessing.games
    assert len(rows(folder / "number_guessing/train.jsonl")) == 31


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_request_does_nothing_again_or_gives_the_same_bytes_and_another_seed_replaces_the_folder(
    folder: Path, tmp_path: Path
) -> None:
    before, out = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}, tmp_path / "assets"
    assert not assets.build(folder, 1, "tiny")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert assets.main(["--out", str(out), "--seed", "1"]) == 0
    assert contents(out) == contents(folder)
    assert assets.main(["--out", str(out), "--seed", "2"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["assets"], "nothing is left beside it"
    changed = contents(out)
    for name in ("model/model.safetensors", "addition/train.jsonl", "addition/sft.jsonl", "number_guessing/sft.jsonl"):
        assert changed[name] != contents(folder)[name]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit) as ended:
        assets.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "assets.json" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"


# ---------------------------------------------------------------- problems and demonstrations


SMALL = AdditionPlan(train=300, held_out=100, clean=400, sloppy=400)


def reward(pair: tuple[int, int], completion: str) -> float:
    environment = Addition(addition_problem(pair), seed=0)
    return asyncio.run(environment.step(Action(completion, (), True))).reward


def test_clean_demonstrations_are_as_documented_and_right_for_the_environment() -> None:
    row = addition_demonstration((384, 519), random.Random(0))
    assert row == {"prompt": "Q: 384+519=? A:", "completion": " 4+9=13, 8+1+1=10, 3+5+1=9 =903"}
    for pair in ((0, 0), (7, 5), (999, 999), (95, 378), (378, 95), (1, 999), (100, 0)):
        row = addition_demonstration(pair, random.Random(0))
        assert row["prompt"] == asyncio.run(Addition(addition_problem(pair), seed=0).reset())
        assert reward(pair, row["completion"]) == 1.0


def test_the_curriculum_is_clean_first_and_then_sloppy() -> None:
    rng = random.Random(2)
    *_, others = addition_pairs(SMALL, rng)
    pairs = list(islice(others, 800))
    rows = list(addition_demonstrations(SMALL, iter(pairs), rng))
    right = [reward(pair, row["completion"]) for pair, row in zip(pairs, rows, strict=True)]
    assert right[:400] == [1.0] * 400
    assert 0.15 < sum(right[400:]) / 400 < 0.45
    blurted = sum(row["completion"].startswith(" =") for row in rows[400:]) / 400
    assert 0.4 < blurted < 0.6


def test_the_long_plan_has_a_heavy_tail_within_its_bound() -> None:
    plan = AdditionPlan(digits=34, median_digits=7.2, spread=0.8, train=1, held_out=1)
    rng = random.Random(3)
    *_, others = addition_pairs(plan, rng)
    rows = [addition_demonstration(pair, rng) for pair in islice(others, 2000)]
    lengths = sorted(len(row["completion"]) + 1 for row in rows)
    assert lengths[-1] <= 384
    assert 82 < sum(lengths) / len(lengths) < 102
    assert lengths[-20] > 3 * lengths[1000]


def test_games_play_by_the_environments_rules() -> None:
    plan = GuessingPlan(games=80)
    won = 0
    for game in guessing_demonstrations(plan, random.Random(4)):
        json.dumps(game)
        won += replay(game["segments"])
    assert 0.2 < won / plan.games < 0.6


def replay(segments: list[list[str | int]]) -> float:
    """Play a game's actions against the environment; its texts must be the recorded ones. The number is inferred."""
    guesses = [str(text) for text, trained in segments if trained]
    for number in range(1, 32):
        environment = NumberGuessing({"number": number}, seed=0)
        said = [[asyncio.run(environment.reset()), 0]]
        for guess in guesses:
            said.append([guess, 1])
            result = asyncio.run(environment.step(Action(guess, (), True)))
            if result.done:
                break
            said.append([result.observation, 0])
        if said == segments and result.done:
            return result.reward
    raise AssertionError(f"no number explains {segments}")


# ---------------------------------------------------------------- overrides


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The quickstart's config as in a fresh clone: nothing that it names exists."""
    text = (ROOT / "configs" / "quickstart.yaml").read_text().replace("runs/", f"{tmp_path}/runs/")
    file = tmp_path / "quickstart.yaml"
    file.write_text(text)
    return str(file)


def test_the_quickstart_asks_before_it_makes_anything_and_what_is_made_later_may_be_missing(config: str) -> None:
    script = (ROOT / "launch" / "quickstart.sh").read_text()
    asked = script.index("launch.quickstart.assets --check configs/quickstart.yaml")
    assert asked < script.index("launch.quickstart.assets --out")
    assert assets.main(["--check", config]) == EXIT_DONE
    assert assets.main(["--check", config, "staleness.max=0", "run.seed=2"]) == EXIT_DONE


def test_the_quickstart_takes_the_page_beside_overrides(tmp_path: Path) -> None:
    script = str(ROOT / "launch" / "quickstart.sh")
    refused = subprocess.run([script, "--web", "run.seed=one"], capture_output=True, text=True)
    assert refused.returncode == EXIT_USAGE and "found 'one'" in refused.stderr
    other = subprocess.run([script, "--page"], capture_output=True, text=True)
    assert other.returncode == EXIT_USAGE and "found '--page'" in other.stderr
    told = subprocess.run([script, "--web", "--help"], capture_output=True, text=True).stdout
    assert "[--web] [key=value ...]" in told and "folders of its own" not in told.splitlines()[0]


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> {log}
case "$1" in sft|up) for word in "$@"; do case "$word" in
  run.dir=*) mkdir -p "${{word#run.dir=}}/model"; touch "${{word#run.dir=}}/model/config.json" ;;
esac; done ;; esac
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_with_the_page_the_quickstart_measures_and_reports_and_in_a_terminal_serves_the_page_last(
    tmp_path: Path, terminal: bool
) -> None:
    """The script of the repository in a folder whose commands only note how they were called."""
    log, programs = tmp_path / "log", tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "quickstart.sh", tmp_path / "launch")
    for name in (programs / "slipstream", programs / "python", tmp_path / "launch" / "setup.sh"):
        name.write_text(STUB.format(log=log))
        name.chmod(0o755)
    ours, theirs = os.openpty()
    script = ["bash", str(tmp_path / "launch" / "quickstart.sh"), "--web"]
    done = subprocess.run(script, stdin=theirs if terminal else subprocess.DEVNULL, capture_output=True, text=True)
    os.close(ours), os.close(theirs)
    assert done.returncode == 0, done.stderr
    commands = [line.split()[1:] for line in log.read_text().splitlines() if line.startswith("slipstream")]
    names = [words[0] for words in commands]
    assert names == ["sft", "up", "eval", "report", *["web"] * terminal]
    assert {"--web", "--no-stay"} <= set(commands[1]), "else the steps after it would wait for Ctrl-C"
    last = "the page stays until Ctrl-C" if terminal else "next: `slipstream web runs/quickstart`"
    assert last in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo=bar", "'foo'"),
        ("rollout.group_size=1", "rollout.group_size: expected"),
        ("weights.publish_every=9", "weights.publish_every: expected"),
        ("tasks.environment=additon", "built-in: 'addition'"),
        ("model.path=/nowhere/at/all", "model.path: expected"),
        ("tasks.dataset=/nowhere.jsonl", "tasks.dataset: expected"),
    ],
)
def test_a_bad_override_is_refused(config: str, override: str, expected: str, capsys: pytest.CaptureFixture) -> None:
    assert assets.main(["--check", config, override]) == EXIT_USAGE
    assert expected in capsys.readouterr().err
