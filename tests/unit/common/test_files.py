import os
from pathlib import Path

import pytest

from common.process.files import move_aside, pretty_json, replace_folder


def test_what_is_moved_aside_gets_the_first_free_number_before_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "ledger-1.json").write_text("older")
    former = tmp_path / "ledger.json"
    former.write_text("newer")
    assert move_aside(former) == tmp_path / "ledger-2.json"
    assert not former.exists()
    assert [(tmp_path / f"ledger-{n}.json").read_text() for n in (1, 2)] == ["older", "newer"]


def test_a_folder_is_moved_aside_with_what_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "lock").write_text("")
    assert move_aside(folder) == tmp_path / "store-1"
    assert (tmp_path / "store-1" / "lock").exists()


def test_json_for_people_is_indented_and_ends_its_line() -> None:
    assert pretty_json({"a": [1]}) == b'{\n  "a": [\n    1\n  ]\n}\n'


def test_a_replacement_that_was_killed_between_its_two_renames_leaves_nothing_after_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(text: str) -> Path:
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "weights").write_text(text)
        return tmp_path / "new"

    renames, rename = iter(range(1)), os.rename

    def first_only(source: Path, target: Path) -> None:
        if next(renames, None) is None:
            raise KeyboardInterrupt
        rename(source, target)

    replace_folder(made("first"), tmp_path / "model")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "rename", first_only)
        replace_folder(made("second"), tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".model.removed.tmp", "new"]
    replace_folder(tmp_path / "new", tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "second"
