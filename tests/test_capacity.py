"""A capacity on what ranks send to experts: what it takes from the answer is counted and said."""

from __future__ import annotations

import json

from command_line import run
from oracle_checks import assert_tokens
from oracle_data import ROOT, load_oracle
from sample_models import oracle_runner

IDS = "1,2,3,4,5,6,7,8,9,10,11,12"


def test_a_capacity_that_holds_every_row_drops_none_and_changes_nothing() -> None:
    oracle, runner = (
        load_oracle("qwen3_moe"),
        oracle_runner("qwen3_moe", "dp=2,tp=2", experts_over="tp", moe_capacity=2),
    )
    assert_tokens(runner, oracle.prompts, oracle.greedy)
    assert runner.dropped == 0


def test_rows_that_a_capacity_drops_are_told_apart_from_the_text() -> None:
    options = ("--mesh", "ep=2", "--token-ids", IDS, "--max-new-tokens", 1, "--moe-capacity", 0.25)
    done = run("generate", ROOT / "qwen3_moe", *options)
    assert (done.status, done.out.count("\n")) == (0, 1)
    # In each of two layers 36 choices of twelve tokens on one rank; the step is one for 16, a quarter of whose choices
    # fits: six rows to each of the two ranks.
    assert done.err == "moe_capacity=0.25 dropped 48 rows on the way to experts: 0 drops nothing\n"
    assert json.loads(run("generate", ROOT / "qwen3_moe", *options, "--json").out)["dropped_rows"] == 48
