"""How tests expect an error: by its class and by the facts that it names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


@contextmanager
def refused(kind: type[E], *facts: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of exactly this class that names every fact: a key, a file or a number, and never a sentence."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    assert type(caught.value) is kind, text
    assert [fact for fact in facts if str(fact) not in text] == [], text
