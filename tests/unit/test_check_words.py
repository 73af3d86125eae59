"""The check of plain words: what it counts, what it leaves out, and that the counts may only fall."""

from pathlib import Path

import pytest

from tests.check_words import check_file, main, problems, sentences, too_wide, words

LONG = " ".join(["word"] * 26)


def found(tmp_path: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text)
    return [(finding.line, finding.problem) for finding in check_file(path)]


def test_a_sentence_of_25_words_passes_and_one_of_26_does_not() -> None:
    assert list(problems(" ".join(["Word"] * 25) + ".")) == []
    assert [p.split(":")[0] for p in problems(f"{LONG}.")] == ["26 words in one sentence, at most 25"]


def test_only_a_full_stop_ends_a_sentence_and_code_links_and_punctuation_are_not_counted_word_by_word() -> None:
    assert len(sentences("**One.** Two. *Three* four.")) == 3
    text = "One: two; three. Four (e.g. Five)? Six 1.5 s."
    assert sentences(text) == ["One: two; three.", "Four (e.g Five)?", "Six 1.5 s."]
    assert words(sentences("Run `a long command with many words` now - see [this page](docs/a.md).")[0]) == 6


@pytest.mark.parametrize(
    "text",
    [
        "alpha, beta, gamma, delta, epsilon, " * 6,
        "a = b + c * d - e / f + g = h + i + j + k + l + m + n + o = " * 2,
        *("What does a node need?", "Held-out accuracy rises.", "It must hold the lock.", "`hold` is a flag."),
    ],
)
def test_lists_of_names_equations_and_the_fields_own_uses_of_a_banned_word_pass(text: str) -> None:
    assert list(problems(text)) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("A node shall stop.", "shall"),
        ("The queue holds two groups.", "holds"),
        ("Of these, one is tried.", "Of"),
        ("What a node needs is here.", "What"),
        ("Word from the learner arrives.", "Word from"),
    ],
)
def test_a_banned_phrase_is_named_with_what_to_say_instead(text: str, phrase: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(f"'{phrase}': ") and problem.count(": ") == 2


def test_a_page_is_read_without_code_tables_headings_and_comments(tmp_path: Path) -> None:
    hidden = f"# {LONG}\n\n```\n{LONG}\n```\n\n| {LONG} |\n\n<!-- {LONG} -->\n\n    {LONG}\n"
    assert found(tmp_path, "page.md", hidden) == []
    assert [line for line, _ in found(tmp_path, "page.md", f"{hidden}\n- short\n- {LONG}\n  more\n")] == [14, 14]
    half = " ".join(["word"] * 19)
    assert found(tmp_path, "page.md", f"- {half}\n- {half}\n\n{half}\n") == [], "list items are sentences of their own"
    # a line that could be wrapped is found, and a long link is not
    assert too_wide("word " * 21) and not too_wide("word " * 20) and not too_wide("see " + "x" * 120)
    assert [line for line, _ in found(tmp_path, "page.md", "Fine.\n" + "word. " * 20 + "\n")] == [2]


def test_docstrings_comments_and_messages_are_read(tmp_path: Path) -> None:
    source = (
        '"""Module.\n\n    code shall pass\n\nIt shall fail.\n"""\n'
        "LIMIT = 3  # it shall fail\n"
        "def f():\n"
        '    """Short.\n\n    Args:\n        x: it shall fail\n    """\n'
        '    print(f"it shall fail {LIMIT}")\n'
        '    raise ValueError(f"it shall fail")\n'
        'NAME = "it shall pass"  # noqa: shall\n'
    )
    assert [line for line, _ in found(tmp_path, "module.py", source)] == [5, 7, 12, 14, 15]
    text = f"# {' '.join(['word'] * 13)}\n# {' '.join(['word'] * 13)}\nkey: 1  # short\n"
    assert [line for line, _ in found(tmp_path, "config.yaml", text)] == [1], "neighbouring lines are one passage"


def test_a_named_file_may_have_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "page.md").write_text(LONG)
    assert main([str(tmp_path)]) == 1
    assert "26 words in one sentence" in capsys.readouterr().out
    (tmp_path / "page.md").write_text("Short.")
    assert main([str(tmp_path)]) == 0
