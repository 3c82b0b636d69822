"""SmolLM2-135M on one device, against transformers with torch on the same cores, turn by turn.

python -m benchmarks.smollm2 GGUF --torch-python PYTHON
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import jaxpar
from benchmarks.common import Spread, arguments, cores, draw_bars, interleave, ratios, show, warn_if_busy, write
from jaxpar.checkpoint.save import collect_tensors, write_model
from jaxpar.engine.requests import SamplingParams
from jaxpar.engine.session import Session
from jaxpar.runner import Runner

GOALS = {"float32": 1.5, "bfloat16": 1.0}
"""How many times torch's tokens a second each dtype has to reach."""

PAUSE = 0.25
"""Seconds between turns: torch's OpenMP threads spin for a while before they sleep, and would take a core from us.

A turn then runs its work twice and counts the second time: a process that has slept for half a second starts slowly, by
up to a quarter, and a server does not sleep.
"""

CHAT = "What is the capital of Japan? Answer in one sentence."
KNOWN: tuple[tuple[str, str], ...] = (
    ("The capital of France is", " Paris.\n\nThe answer is: 2018-01-22 12:12:53"),
    (
        "def fibonacci(n):\n",
        "\ndef fibonacci(n):\n    if n <= 1:\n        return n\n    else:\n        return fibonacci(n - 1) + fib",
    ),
    (CHAT, "The capital of Japan is Tokyo.<|im_end|>"),
)
"""Prompts and the greedy text that must follow in float32; CHAT goes through the chat template."""


@dataclass(frozen=True)
class Work:
    """A prefill of `batch` prompts of `tokens`, or `steps` decode steps after it; without a goal, it shows growth."""

    phase: str
    batch: int
    tokens: int
    steps: int = 0
    has_goal: bool = True

    @property
    def counted(self) -> int:
        """Tokens that a turn is about."""
        return self.batch * (self.steps or self.tokens)

    @property
    def label(self) -> str:
        """As the table names it."""
        return f"prefill {self.tokens}" if self.phase == "prefill" else f"decode, batch {self.batch}"

    def prompts(self) -> list[list[int]]:
        """The same ids for everyone."""
        return np.random.default_rng(0).integers(0, 49000, (self.batch, self.tokens)).tolist()


WORK = (
    Work("prefill", 1, 256, has_goal=False),
    Work("prefill", 1, 512),
    Work("decode", 1, 112, steps=32),
    Work("decode", 8, 112, steps=32),
)


class Torch:
    """The worker process, as an object."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Call a method of torch_worker.Worker."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": method, "with": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the torch worker ended with status {self._process.wait()}: see its message above")
        return json.loads(line)


@contextmanager
def torch_worker(python: Path, runner: Runner) -> Iterator[Torch]:
    """The same weights under transformers, saved as float32 in Hugging Face's layout; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        tensors = collect_tensors(runner.programs.weights, runner.weights)
        write_model(Path(folder), replace(runner.config, dtype="float32"), tensors)
        del tensors
        command = [str(python), str(Path(__file__).with_name("torch_worker.py")), folder, str(cores())]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            try:
                yield Torch(process)
            finally:
                process.kill()


def check_known_texts(runner: Runner, torch: Torch) -> None:
    """Refuse to measure a model that says anything but the known texts, or another token than torch."""
    tokenizer = runner.checkpoint.require_tokenizer()
    for prompt, expected in KNOWN:
        chat = prompt == CHAT
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
        ids = tokenizer.encode(text, add_special_tokens=not chat)
        wanted = torch("generate", dtype="float32", prompt=ids, count=32)
        (completion,) = runner.generate([ids], max_new_tokens=32)
        tokens = completion.token_ids
        if completion.finish_reason == "stop":
            wanted = wanted[: len(tokens)]
        said = tokenizer.decode(tokens, skip_special_tokens=False)
        if tokens != wanted or not said.startswith(expected):
            raise SystemExit(f"after {prompt!r} jaxpar says {tokens} {said!r}, torch {wanted}, expected {expected!r}")
        print(f"{len(tokens)} tokens as expected: {prompt!r} -> {said!r}")


def run_jaxpar(runner: Runner, work: Work, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds of the prefill or of the decode steps, from token ids to token ids."""
    # As `generate` reserves pages: the last token is never stored.
    capacity = [work.tokens + work.steps] * work.batch
    session = Session(runner.programs, runner.weights, prompts, capacity, SamplingParams())
    start = time.perf_counter()
    for chunk in session.prefill():
        latest = chunk.decoded.tokens
    if work.steps:
        start = time.perf_counter()
    for _ in range(work.steps):
        (decoded,) = session.decode(latest)
        latest = decoded.tokens
    return time.perf_counter() - start


def measure(runner: Runner, torch: Torch, work: Work, rounds: int) -> dict[str, Any]:
    """One row: turns of both, and what each used of the cores while the other ran."""
    prompts, dtype = work.prompts(), runner.plan.dtype
    attention = torch("fastest_attention", dtype=dtype, prompts=prompts, steps=work.steps)
    idle: dict[str, list[float]] = {"jaxpar": [], "torch": []}

    def ours() -> float:
        time.sleep(PAUSE)
        run_jaxpar(runner, work, prompts)
        return run_jaxpar(runner, work, prompts)

    def theirs() -> float:
        time.sleep(PAUSE)
        before = time.process_time()
        torch("run", dtype=dtype, attention=attention, prompts=prompts, steps=work.steps)
        reply = torch("run", dtype=dtype, attention=attention, prompts=prompts, steps=work.steps)
        idle["jaxpar"].append(time.process_time() - before)
        idle["torch"].append(reply["idle_cpu_seconds"])
        return float(reply["seconds"])

    seconds = interleave({"jaxpar": ours, "torch": theirs}, rounds)
    speed = {name: [work.counted / taken for taken in taken_by] for name, taken_by in seconds.items()}
    ratio = ratios(speed["jaxpar"], speed["torch"])
    return {
        "work": asdict(work),
        "dtype": dtype,
        "torch_attention": attention,
        "tokens_per_second": {name: Spread.of(values).to_json() for name, values in speed.items()},
        "ratio": ratio.to_json(),
        "goal": GOALS[dtype] if work.has_goal else None,
        "met": not work.has_goal or ratio.median >= GOALS[dtype],
        "seconds": seconds,
        "idle_cpu_seconds": {name: max(values) for name, values in idle.items()},
    }


def main() -> None:
    """Check the texts, measure, report."""
    parser = arguments("SmolLM2-135M on one device against transformers with torch.", rounds=9)
    parser.add_argument("gguf", type=Path, help="the GGUF file, as benchmarks.fetch_smollm2 gives it")
    parser.add_argument("--torch-python", type=Path, required=True, help="a Python with torch and transformers")
    parser.add_argument("--dtype", choices=list(GOALS), nargs="+", default=list(GOALS), help="dtypes to measure")
    options = parser.parse_args()
    warn_if_busy()
    rows = []
    float32 = jaxpar.load(options.gguf, "tp=1", platform="cpu", dtype="float32")
    with torch_worker(options.torch_python, float32) as torch:
        check_known_texts(float32, torch)
        versions = torch("versions")
        for dtype in options.dtype:
            runner = float32 if dtype == "float32" else jaxpar.load(options.gguf, "tp=1", platform="cpu", dtype=dtype)
            for work in WORK:
                rows.append((work, measure(runner, torch, work, options.rounds)))
                print(f"{dtype}, {work.label}: {Spread(**rows[-1][1]['ratio'])}", file=sys.stderr)
    report(rows, versions, options.rounds, options.out)
    if not all(row["met"] for _, row in rows):
        sys.exit("jaxpar is slower than it has to be")


def report(rows: Sequence[tuple[Work, dict[str, Any]]], versions: dict[str, str], rounds: int, out: Path) -> None:
    """Table, JSON and picture."""
    show(
        f"SmolLM2-135M, one device, {cores()} cores, {rounds} rounds: tokens a second, median (min-max)",
        ["work", "dtype", "jaxpar", f"torch {versions['torch']}", "attention", "jaxpar / torch", "goal", ""],
        [
            (
                work.label,
                row["dtype"],
                *(Spread(**row["tokens_per_second"][name]) for name in ("jaxpar", "torch")),
                row["torch_attention"],
                Spread(**row["ratio"]),
                row["goal"] or "",
                "" if row["goal"] is None else "met" if row["met"] else "MISSED",
            )
            for work, row in rows
        ],
        left=2,
    )
    write(out, "smollm2", {"versions": versions, "rounds": rounds, "rows": [row for _, row in rows]})
    dtypes = dict.fromkeys(row["dtype"] for _, row in rows)
    draw_bars(
        out / "smollm2.png",
        f"SmolLM2-135M, one device, {cores()} cores: speed against transformers with torch",
        "tokens a second, jaxpar / torch",
        list(dict.fromkeys(work.label for work, _ in rows)),
        {dtype: [Spread(**row["ratio"]) for _, row in rows if row["dtype"] == dtype] for dtype in dtypes},
        parity=True,
    )


if __name__ == "__main__":
    main()
