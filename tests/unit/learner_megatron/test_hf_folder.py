"""Model folders: what cannot be read is refused by name, and a new one is complete or absent."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import UsageError
from learner.megatron.conversion import hf_folder
from learner.megatron.conversion.hf_folder import check_names, give_rope_theta, new_folder, read_config
from tests.rigs.refusals import refused


@pytest.mark.parametrize(
    ("document", "fact"),
    [("{", "valid JSON"), (json.dumps({"model_type": "qwen3"}), "architectures")],
)
def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path: Path, document: str, fact: str) -> None:
    (tmp_path / "config.json").write_text(document)
    with refused(UsageError, tmp_path / "config.json", fact):
        read_config(tmp_path)


def test_rope_theta_is_put_where_the_bridge_reads_it() -> None:
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    give_rope_theta(config)
    assert config.rope_theta == 1e6


def test_a_tensor_that_no_mapping_takes_is_refused_by_name_unless_nothing_is_lost() -> None:
    names = ["model.norm.weight", "model.layers.0.self_attn.o_proj.bias"]
    with refused(UsageError, names[1], "1 tensors"):
        check_names(Path("some"), names, ["model.norm.weight"], layers=1)
    # a layer that predicts a further token, a table that is computed again, and a head that may be tied
    names = ["model.layers.2.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"]
    check_names(Path("some"), names, [], layers=2)
    with pytest.raises(UsageError):
        check_names(Path("some"), names, [], layers=3)


def test_a_new_folder_appears_when_it_is_complete_and_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(hf_folder, "sync", lambda path: synced.append(path.name))
    target = tmp_path / "model"
    with new_folder(target) as staging:
        for name in ("a", "b"):
            (staging / name).write_bytes(b"new")
        assert not target.exists()
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {"a": b"new", "b": b"new"}
    assert synced == ["a", "b", staging.name, tmp_path.name]
    assert not staging.exists()


def test_a_new_folder_takes_the_place_of_the_old_one_and_of_what_an_interrupted_write_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as staging:
        (staging / "weights").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), new_folder(target) as staging:
        (staging / "half").write_bytes(b"written")
        raise KeyboardInterrupt
    assert (target / "weights").read_bytes() == b"old"
    with new_folder(target) as staging:
        (staging / "weights").write_bytes(b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert [file.read_bytes() for file in target.iterdir()] == [b"new"]
