"""Pages that a program writes in part."""

import pytest

from launch.dev.doc_markers import replaced


def test_what_stands_between_the_marks_is_replaced_and_nothing_else() -> None:
    assert replaced("a <b> old </b> c </b>", "<b>", "</b>", "new") == "a <b>new</b> c </b>"


@pytest.mark.parametrize(("page", "missing"), [("a </b>", "<b>"), ("a <b> old", "</b>"), ("</b> <b>", "</b>")])
def test_a_missing_mark_is_named(page: str, missing: str) -> None:
    with pytest.raises(ValueError, match=f"no '{missing}'"):
        replaced(page, "<b>", "</b>", "new")
