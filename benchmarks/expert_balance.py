"""Balance on real routing: how uneven devices are with the bundled model's experts in order, and with copies.

python -m benchmarks.expert_balance

Loads come from the first half of a text that the model was not trained on; the placement that they make is then judged
by that half, and by the half that follows, which it has not seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import jaxpar
from benchmarks.common import Spread, arguments, draw_bars, show, write
from jaxpar.moe.balance import device_loads, in_order, over_mean, place
from jaxpar.runner import Runner

MODEL, WINDOW = "tiny-moe", 256
TEXT = Path(__file__).parent / "persuasion.txt"
"""The last two chapters of Persuasion: the model was trained on what comes before the last 5 % of all novels."""
DEVICES, EXTRA_SLOTS = 4, (0, 4, 8)


def loads_of(runner: Runner, ids: list[int]) -> np.ndarray:
    """Tokens that chose each expert [layers, E] where the model reads `ids`, a window at a time."""
    windows = [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
    with runner.record_experts() as record:
        runner.generate(windows, max_new_tokens=1, ignore_eos=True)
    loads: np.ndarray = record.stats().loads.astype(float)
    return loads


def fullest(of_devices: np.ndarray) -> Spread:
    """The fullest device's load over the mean, over layers."""
    return Spread.of(over_mean(of_devices).max(axis=1).tolist())


def main() -> None:
    """Read the text, place, report."""
    options = arguments("Balance on real routing.", rounds=1).parse_args()
    runner = jaxpar.load(MODEL)
    ids = runner.checkpoint.require_tokenizer().encode(TEXT.read_text(encoding="utf-8"))
    halves = {
        "same text": loads_of(runner, ids[: len(ids) // 2]),
        "text after": loads_of(runner, ids[len(ids) // 2 :]),
    }
    seen = halves["same text"]
    experts = seen.shape[1]
    rows: list[dict[str, Any]] = []
    for name, loads in halves.items():
        rows.append({"slots": "expert alone", "judged by": name, "fullest": fullest(loads).to_json()})
        rows.append({"slots": "in order", "judged by": name, "fullest": fullest(in_order(loads, DEVICES)).to_json()})
        for extra in EXTRA_SLOTS:
            placed = place(seen, experts + extra, DEVICES)
            found = fullest(device_loads(loads, placed.slots, DEVICES))
            rows.append({"slots": f"{experts}+{extra}", "judged by": name, "fullest": found.to_json()})
    show(
        f"{MODEL}: {seen.shape[0]} layers of {experts} experts on {DEVICES} devices, {len(ids)} tokens: fullest device "
        "over the mean, median layer (best-worst)",
        ["slots", "judged by", "fullest / mean"],
        [(row["slots"], row["judged by"], Spread(**row["fullest"])) for row in rows],
        left=2,
    )
    write(options.out, "expert_balance", {"tokens": len(ids), "devices": DEVICES, "rows": rows})
    labels = list(dict.fromkeys(row["slots"] for row in rows))
    series = {name: [Spread(**row["fullest"]) for row in rows if row["judged by"] == name] for name in halves}
    draw_bars(
        options.out / "expert_balance.png",
        f"Experts of {MODEL} on {DEVICES} devices: fullest over mean, placed by the first half of a text",
        "load of the fullest, mean = 1",
        labels,
        series,
        parity=True,
    )


if __name__ == "__main__":
    main()
