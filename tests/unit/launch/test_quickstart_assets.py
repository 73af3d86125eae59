"""The quickstart's model folder and datasets, as built."""

import json
import string
from pathlib import Path

import pytest

from launch.quickstart import assets as assets

TEXTS = [
    string.printable[:95] + "\n",
    " a",
    "a ",
    "  two  spaces ",
    "\n\n x",
    "Q: 384+519=? A:",
    " 4+9=13, 8+1+1=10 =903",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "assets"
    assert assets.build(out, 1, "tiny")
    return out


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("text", [*TEXTS, *(chr(c) for c in range(32, 127)), "\n"])
def test_text_survives_the_tokenizer_character_by_character(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_every_id_decodes_and_special_tokens_have_their_ids(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
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
    assert not asked & kept
    assert not (asked | kept) & {row["prompt"] for row in demonstrations}
    assert len(rows(folder / "number_guessing/sft.jsonl")) == assets.PRESETS["tiny"].guessing.games
    assert len(rows(folder / "number_guessing/train.jsonl")) == 31


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_same_request_again_does_nothing_and_elsewhere_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    assert not assets.build(folder, 1, "tiny")
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
    assert assets.build(tmp_path / "again", 1, "tiny")
    assert contents(tmp_path / "again") == contents(folder)


def test_another_seed_replaces_the_folder_and_leaves_nothing_beside_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "assets"
    assert assets.main(["--out", str(out), "--seed", "1"]) == 0
    assert assets.main(["--out", str(out), "--seed", "2"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["assets"]
    changed = contents(out)
    for name in ("model/model.safetensors", "addition/train.jsonl", "addition/sft.jsonl", "number_guessing/sft.jsonl"):
        assert changed[name] != contents(folder)[name]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit) as ended:
        assets.main(["--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "has no assets.json" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "precious"
