from pathlib import Path

from common.process.files import move_aside, pretty_json


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
