"""What the README says of the code is so: every strategy has its row, and every link its file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpar.registry import STRATEGIES

REPOSITORY = Path(__file__).parent.parent
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ROW = re.compile(r"^\| `(\w+)` \|.*\]\(jaxpar/([\w/]+)\.py\) \|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def test_every_strategy_has_a_row_with_its_module_and_its_test() -> None:
    rows = ROW.findall(PAGES[0].read_text())
    modules = {(strategy.name, strategy.module) for strategy in STRATEGIES}
    assert {(name, f"jaxpar.{module.replace('/', '.')}") for name, module, _ in rows} == modules
    for name, _, test in rows:
        assert re.fullmatch(r" \[(test_\w+)\]\(tests/\1\.py\) ", test), f"{name}: the last column is a link to its test"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    absent = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert absent == []
