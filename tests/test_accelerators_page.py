"""The table of what compiles for accelerators, in docs, is of all strategies that are registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.cli.compile import TARGETS
from jaxpar.registry import STRATEGIES

PAGE = Path(__file__).parent.parent / "docs" / "accelerators.md"
BEGIN, END = "<!-- every strategy: jaxpar compile --all --markdown -->\n", "<!-- end of every strategy -->"


@pytest.fixture(scope="module")
def table() -> list[dict[str, str]]:
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_it_has_every_registered_strategy_in_the_order_of_the_registry(table: list[dict[str, str]]) -> None:
    shown = [(row["sublayer"], row["strategy"].strip("`")) for row in table]
    assert shown == [(strategy.sublayer, strategy.name) for strategy in STRATEGIES]


def test_each_compiles_for_a_tpu_and_a_gpu(table: list[dict[str, str]]) -> None:
    for row in table:
        assert all(row[target].startswith("yes") for target in TARGETS), row
