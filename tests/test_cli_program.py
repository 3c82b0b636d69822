"""The program as its users start it: at once, quiet in pipes, alive on a terminal, and gone at Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import run
from sample_models import write_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import jaxpar
from jaxpar.layout import LAYOUTS
from jaxpar.registry import STRATEGIES

REPOSITORY = Path(__file__).parent.parent
JAXPAR = (sys.executable, "-W", "error", "-m", "jaxpar")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
ENVIRONMENT |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "200"}
COMMANDS = (
    "demo",
    "generate",
    "verify",
    "ledger",
    "mesh",
    "layout",
    "pipeline",
    "balance",
    "strategies",
    "train",
    "doctor",
    "calibrate",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose token ids are the words w0, w1, ..., w100 with room for a long text."""
    directory = write_model(tmp_path_factory.mktemp("model"), eos_token_id=None, max_position_embeddings=4096)
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(101)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@contextmanager
def on_a_terminal(*arguments: object) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start `jaxpar <arguments>` on a terminal of its own; gives the process and the terminal's other end."""
    ours, theirs = os.openpty()
    # Where a shell runs the tests in the background they ignore Ctrl-C, and so would what they start.
    ours_before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([*JAXPAR, *map(str, arguments)], env=ENVIRONMENT, stdout=theirs, stderr=theirs)
    signal.signal(signal.SIGINT, ours_before)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str | None, seconds: float = 60) -> str:
    """What appears on a terminal until it holds `wanted`, or (None) until the program ends."""
    shown, deadline = b"", time.monotonic() + seconds
    while wanted is None or wanted not in shown.decode(errors="replace"):
        assert time.monotonic() < deadline, shown
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux says so when the other end is closed
            piece = b""
        if not piece:
            break
        shown += piece
    return shown.decode()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_help_lists_every_command_with_what_it_does() -> None:
    done = run("--help")
    assert (done.status, done.err) == (0, "")
    for command in COMMANDS:
        (line,) = (line for line in done.out.splitlines() if line.startswith(f"  {command} "))
        assert len(line.split()) > 3
    assert run().out == run("-h").out == done.out


def test_no_summary_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("--help").out.partition("Commands:")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    done = run(command, "--help")
    assert (done.status, done.err) == (0, "")
    assert "--json" in done.out


def test_version_names_what_a_bug_report_needs() -> None:
    done = run("--version")
    assert done.status == 0
    assert re.fullmatch(rf"jaxpar {jaxpar.__version__} \(JAX \d+\.\d+\S*, Python 3\.\d+\.\d+\S*\)\n", done.out)


def test_the_program_starts_and_refuses_a_mesh_without_importing_jax(fresh_python) -> None:
    code = """
import sys
sys.argv = ["jaxpar", "verify", "nowhere", "--mesh", "tp=0"]
import jaxpar.cli
try:
    jaxpar.cli.main()
except SystemExit as done:
    print(done.code, sorted({"jax", "flax"} & sys.modules.keys()))
"""
    assert fresh_python(code) == "2 []\n"


def test_load_is_there_as_soon_as_it_is_asked_for(fresh_python) -> None:
    code = "import jaxpar; print(callable(jaxpar.load), jaxpar.Runner.__module__, hasattr(jaxpar, 'nothing'))"
    assert fresh_python(code) == "True jaxpar.runner False\n"


def test_one_prompt_on_a_terminal_streams_after_its_prompt_and_figures_follow(model: Path) -> None:
    with on_a_terminal("generate", model, "--prompt", "w1 w2", "--max-new-tokens", "5") as (process, terminal):
        shown = read_until(terminal, None)
        assert process.wait(60) == 0
    assert "Generating for 1 prompt" in shown
    *_, text, figures = without_escapes(shown.replace("\r", "")).rstrip("\n").split("\n")
    assert re.fullmatch(r"w1 w2w\d+( w\d+){4}", text)
    assert re.fullmatch(r"5 tokens in \d.* s, .* tokens/s, the first after .* s; compilation is in it", figures)


def test_ctrl_c_ends_a_run_with_status_130_and_no_traceback(model: Path) -> None:
    command = ("generate", model, "--prompt", "w1 w2", "--max-new-tokens", "4000", "--ignore-eos")
    with on_a_terminal(*command) as (process, terminal):
        read_until(terminal, "w1 w2")
        process.send_signal(signal.SIGINT)
        rest = read_until(terminal, None)
        assert process.wait(60) == 130
    assert re.fullmatch(r"( ?w\d+| |\n|\^C)*", without_escapes(rest).replace("\r", ""))


def test_a_reader_that_has_seen_enough_ends_the_program_quietly() -> None:
    command = [*JAXPAR, "mesh", "dp=4096,tp=4"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"dp=4096,tp=4: 16384 ranks\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_characters_that_the_output_cannot_show_are_escaped(tmp_path: Path) -> None:
    preset = (REPOSITORY / "meshes" / "h200-8.toml").read_text()
    description = re.search(r'^description = "(.*)"$', preset, re.MULTILINE)[1]
    (tmp_path / "café.toml").write_text(preset.replace(description, "Achtfach é"), encoding="utf-8")

    def shown(*options: str) -> str:
        command = [*JAXPAR, "mesh", str(tmp_path / "café.toml"), *options]
        ascii_only = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
        return subprocess.run(command, env=ascii_only, check=True, capture_output=True, timeout=60).stdout.decode()

    assert shown().startswith(r"caf\xe9: Achtfach \xe9" + "\n")
    assert json.loads(shown("--json"))["preset"]["description"] == "Achtfach é"


@pytest.mark.parametrize("command", ["generate", "verify", "ledger"])
def test_the_help_of_an_option_names_every_strategy_that_it_may_choose(command: str) -> None:
    shown = " ".join(run(command, "--help").out.split())
    for strategy in STRATEGIES:
        if strategy.sublayer in ("prefill_attention", "decode_attention", "all_reduce") and "cp" in strategy.axes:
            assert strategy.name in shown
    for layout in LAYOUTS:
        assert layout in shown
