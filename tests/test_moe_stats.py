"""Statistics of experts: what `generate --moe-stats` says, and that other commands take it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from oracle_data import ROOT, load_oracle
from rich.console import Console
from sample_models import write_model

import jaxpar
from jaxpar import PlanError
from jaxpar.checkpoint import open_checkpoint
from jaxpar.cli.moe_stats import render
from jaxpar.moe.stats import ExpertStats


def test_statistics_count_every_choice_and_other_commands_take_them(tmp_path: Path) -> None:
    oracle = load_oracle("qwen3_moe")
    prompts = [part for ids in oracle.prompts for part in ("--token-ids", ",".join(map(str, ids)))]
    options = ("--mesh", "ep=4", "--page-size", "64", "--ignore-eos", "--max-new-tokens", "6")
    moving = ("--expert-slots", "12", "--rebalance-every", "2", "--moe-dispatch", "all_to_all")
    done = run("generate", ROOT / "qwen3_moe", *prompts, *options, *moving, "--moe-stats", "--json")
    assert (done.status, done.err) == (0, "")
    document = json.loads(done.out)
    assert [row["token_ids"] for row in document["completions"]] == [row[:6] for row in oracle.greedy]
    stats = document["moe_stats"]
    moe = open_checkpoint(ROOT / "qwen3_moe").config.moe
    assert moe is not None
    tokens = sum(map(len, oracle.prompts)) + 5 * len(oracle.prompts)
    choices = tokens * moe.router.top_k
    assert [sum(layer) for layer in stats["loads"]] == [choices] * 2
    assert [sum(layer) for layer in stats["rank_loads"]] == pytest.approx([choices] * 2)
    assert stats["steps"] == 6 and stats["dropped_rows"] == 0
    for layer, loads in zip(stats["layers"], stats["loads"], strict=True):
        assert layer["mean_tokens_per_expert"] == choices / 8
        assert layer["largest_over_mean_expert"] == max(loads) / (choices / 8)
        assert loads[layer["hottest"][0]] == max(loads)
        assert 0 < layer["drift"] < 1
    shares = stats["time_shares"]
    assert shares["dispatch"] > 0 and shares["experts"] > 0 and shares["dispatch"] + shares["experts"] < 1
    assert document["rebalanced"]
    for move in document["rebalanced"]:
        assert move["after"] < move["before"] and move["slots"] > 0 and len(move["sent_bytes"]) == 4

    file = tmp_path / "run.json"
    file.write_text(done.out)
    balanced = json.loads(run("balance", "--loads", file, "--slots", 12, "--devices", 4, "--json").out)
    assert [layer["mean"] for layer in balanced["layers"]] == [choices / 4] * 2
    counted = run(
        "ledger", ROOT / "qwen3_moe", "--mesh", "ep=4", *moving[:2], "--context", "32", "--loads", file, "--no-compile"
    )
    assert counted.status == 0


def test_over_stages_ticks_are_counted_and_called_so() -> None:
    stats = ExpertStats(14, 4, np.ones((2, 1, 4)), np.ones((1, 2)), dropped=0, time=None)
    document = stats.to_json()
    assert (document["ticks"], "steps" in document) == (14, False)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(stats))
    said = console.export_text()
    assert "Tokens of each expert in 14 ticks" in said and "A token's layers fall into 4 ticks: of tokens under" in said


def test_drift_is_the_part_of_the_tokens_that_went_elsewhere() -> None:
    halves = np.array([[[4, 4, 0, 0], [1, 1, 1, 1]], [[1, 1, 2, 0], [0, 0, 0, 0]]])
    stats = ExpertStats(steps=2, stages=1, halves=halves, rank_loads=np.ones((2, 2)), dropped=3, time=None)
    np.testing.assert_array_equal(stats.drift, [0.5, np.nan])
    first = stats.to_json()["layers"][0]
    assert (first["hottest"], first["hottest_by_half"]) == ([0, 1, 2], [[0, 1], [2, 0, 1]])
    assert stats.to_json()["loads"] == [[5, 5, 2, 0], [1, 1, 1, 1]]


def test_there_is_nothing_to_record_without_experts_or_steps(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="this llama has no experts, of which there is nothing to record"):
        jaxpar.load(write_model(tmp_path)).record_experts()
    with (
        jaxpar.load(ROOT / "qwen3_moe", "ep=2").record_experts() as record,
        pytest.raises(PlanError, match="no step has run while experts were recorded"),
    ):
        record.stats()
