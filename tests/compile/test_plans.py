"""`jaxpar plan --check`: the best plans as a GPU's compiler makes them."""

from __future__ import annotations

import json
import subprocess
import sys


def test_what_is_predicted_of_a_plan_is_what_the_compiler_makes() -> None:
    asked = "plan tiny --cluster h200-2 --input 60 --output 20 --concurrency 4 --explain tp=2 --check 1 --json"
    command = [sys.executable, "-m", "jaxpar", *asked.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["checked"]
    assert [row["phase"] for row in rows] == ["prefill", "decode"]
    for row in rows:
        assert row["fits"]
        for name in ("weights", "cache", "sent", "flops"):
            assert row["pairs"][name]["predicted"] == row["pairs"][name]["compiled"] > 0, (row["phase"], name)
