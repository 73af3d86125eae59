"""The part of a page that a program writes: what stands between two marks."""


def replaced(page: str, begin: str, end: str, text: str) -> str:
    """`page` with `text` between its marks, which stay; raises ValueError when a mark is missing."""
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise ValueError(f"the page has no {(end if first else begin).strip()!r}")
    return before + begin + text + end + after
