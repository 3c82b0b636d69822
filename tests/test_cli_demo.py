"""`jaxpar demo`: texts, the proof and the ledger in one go, with a status that says whether all of it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from sample_models import write_model

from jaxpar.verify import RankResult, Verification


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_the_demo_as_json_holds_texts_proof_and_ledger(model: Path) -> None:
    done = run("demo", model, "--mesh", "dp=2,tp=3", "--json")
    assert (done.status, done.err) == (0, "")
    document = json.loads(done.out)
    assert document["passed"]
    assert [len(completion["token_ids"]) for completion in document["completions"]] == [24] * 5
    assert {row["rank"] for row in document["verification"]["results"]} == set(range(6))
    assert document["verification"]["tokens"] == [completion["token_ids"] for completion in document["completions"]]
    assert document["ledger"]["agree"] and document["ledger"]["sent_bytes"] > 0


def test_the_demo_fails_where_a_rank_differs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [RankResult(prompt, rank, wrong_tokens=prompt == 3) for prompt in range(5) for rank in range(2)]
    monkeypatch.setattr("jaxpar.verify.verify", lambda *_, **__: Verification(1e-4, [[1]] * 5, 0.5, wrong))
    done = run("demo", model, "--mesh", "tp=2")
    assert (done.status, done.err) == (1, "")
    lines = done.out.splitlines()
    assert [line[:2] for line in lines if line[:3] in ("1. ", "2. ", "3. ")] == ["1.", "2.", "3."]
    assert any(line.startswith("FAILED: tp=2 against one device") for line in lines)
    assert lines[-1].startswith("FAILED in ")
