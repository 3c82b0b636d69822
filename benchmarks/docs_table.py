"""Tables of benchmarks in docs, between two comments that name the benchmark: made by it, never by hand."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def fill(page: Path, name: str, text: str) -> None:
    """Put `text` between the page's comments that begin and end `name`.

    Raises:
        ValueError: the page has no such place.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name}: made by benchmarks -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not begin or not end:
        raise ValueError(f"{page} has no place for {name}: write <!-- {name}: made by benchmarks --> and its end")
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}", encoding="utf-8")
