"""`jaxpar verify`: the verdict on a user's own model, and an exit status that scripts can trust."""

from __future__ import annotations

import json
import math

import pytest
from command_line import Result, run
from oracle_data import ROOT
from sample_models import write_model

import jaxpar
from jaxpar.cli.prompts import builtin_prompts
from jaxpar.engine.prompts import encode_prompts
from jaxpar.verify import RankResult, Verification

MESH = ("--mesh", "dp=2,tp=3", "--max-new-tokens", "3")


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    done = run("verify", ROOT / "llama_9_3", *MESH, "--json")
    assert (done.status, done.err) == (0, "")
    return json.loads(done.out)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    model = write_model(tmp_path_factory.mktemp("model"))
    return run("verify", model, *MESH, "--tolerance", "0", "--token-ids", "5,6,7")


def test_every_rank_of_the_replica_that_serves_a_prompt_is_compared(document: dict[str, object]) -> None:
    results = document["results"]
    assert [(row["prompt"], row["rank"]) for row in results] == [
        (prompt, 3 * (prompt % 2) + rank) for prompt in range(4) for rank in range(3)
    ]
    assert all(0 < row["max_difference"] < 1e-4 and row["compared"] > 0 for row in results)
    assert all(row["wrong_tokens"] == row["ties"] == 0 for row in results)
    assert document["passed"] and document["max_difference"] == max(row["max_difference"] for row in results)
    assert document["tolerance"] == 1e-4 and document["margin"] > 1e-4


def test_prompts_of_awkward_lengths_stand_in_where_none_is_given(document: dict[str, object]) -> None:
    assert [len(prompt) for prompt in document["prompts"]] == [1, 7, 19, 12]
    assert [len(tokens) for tokens in document["tokens"]] == [3] * 4


def test_a_difference_above_the_tolerance_is_exit_status_1(failed: Result) -> None:
    assert (failed.status, failed.err) == (1, "")
    assert failed.out.splitlines()[-1].startswith(
        "FAILED: dp=2,tp=3 against one device in float32, 3 tokens on 3 ranks (3 idle: fewer prompts than replicas)"
    )
    assert "(tolerance 0; verify's --tolerance sets another)" in failed.out.splitlines()[-1]


def test_the_table_has_a_row_for_every_prompt_and_rank(failed: Result) -> None:
    lines = failed.out.splitlines()
    assert lines[0].split("  ")[0] == "prompt" and "max |difference|" in lines[0]
    assert [line.split()[:3] for line in lines[1:4]] == [["0", "3", str(rank)] for rank in range(3)]


def test_built_in_prompts_fit_any_model_and_reach_every_replica() -> None:
    checkpoint = jaxpar.load(ROOT / "llama_9_3").checkpoint
    prompts = builtin_prompts(checkpoint.config, 7, new_tokens=120)
    assert [len(prompt) for prompt in prompts] == [1, 7, 8, 8, 1, 7, 8]
    assert encode_prompts(checkpoint, prompts, 120) == prompts
    assert len({token for prompt in prompts for token in prompt}) > 20


def test_a_nan_passes_nothing_and_is_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Verification(1e-4, [[1]], 1.0, [RankResult(prompt=0, rank=0, max_difference=math.nan, compared=1)])
    monkeypatch.setattr("jaxpar.verify.verify", lambda *_, **__: broken)
    done = run("verify", ROOT / "llama_9_3", "--mesh", "tp=1", "--json")
    assert done.status == 1
    assert json.loads(done.out)["results"][0]["max_difference"] is None


def test_tokens_of_a_lossy_plan_are_no_proof_and_none_of_them_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [RankResult(0, rank, max_difference=0.1, compared=9, ties=rank) for rank in range(2)]
    monkeypatch.setattr("jaxpar.verify.verify", lambda *_, **__: Verification(0.5, [[1]], 1.0, results, lossy=0.04))
    done = run("verify", ROOT / "llama_9_3", "--mesh", "tp=1")
    assert done.status == 0
    lines = done.out.splitlines()
    assert [line.split()[-2:] for line in lines[1:3]] == [["-", "0"], ["-", "1"]]
    assert (
        "(tolerance 0.5, lossy: 4% of the largest logit), tokens, which prove nothing then, differ in 1 of 2 texts"
        in (lines[-1])
    )
