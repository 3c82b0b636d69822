"""`jaxpar pipeline`: the timetable, its bubble, and the stages and chunks of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run
from matplotlib import image

from jaxpar.assets import model_dir
from jaxpar.checkpoint import open_checkpoint
from jaxpar.ledger.steps import make_steps
from jaxpar.mesh import MeshSpec
from jaxpar.pipeline import send_recv
from jaxpar.pipeline.timetable import decode_timetable, prefill_timetable
from jaxpar.plan import Phase, Plan
from jaxpar.tables import human_bytes


def output(*arguments: object) -> str:
    done = run("pipeline", *arguments)
    assert (done.status, done.err) == (0, "")
    return done.out


def test_sixteen_microbatches_through_four_stages() -> None:
    lines = output("--pp", 4, "--microbatches", 16).splitlines()
    assert lines[0] == "prefill: 16 items through 4 stages in 19 ticks"
    assert lines[2].split() == ["tick", *map(str, range(19))]
    for stage in range(4):
        row = ["stage", str(stage), *["."] * stage, *map(str, range(16)), *["."] * (3 - stage)]
        assert lines[3 + stage].split() == row
    assert lines[-1] == "12 of 76 slots idle: 15.79 % = (p-1)/(m+p-1) = 3/19"


def test_many_ticks_are_cut_in_the_middle_and_whole_in_json() -> None:
    lines = output("--pp", 2, "--microbatches", 64).splitlines()
    assert lines[3].split()[-4:] == ["61", "62", "63", "."]
    assert "..." in lines[3].split()
    assert lines[-1] == "2 of 130 slots idle: 1.54 % = (p-1)/(m+p-1) = 1/65"
    document = json.loads(output("--pp", 2, "--microbatches", 64, "--json"))
    assert document["timetable"] == [[*range(64), None], [None, *range(64)]]
    assert (document["idle_slots"], document["idle_share_exact"]) == (2, "1/65")


def test_groups_of_decode_are_shown_in_rotation() -> None:
    lines = output("--phase", "decode", "--pp", 3, "--groups", 2, "--rounds", 2).splitlines()
    assert lines[0] == "decode: 2 tokens of each of 2 groups through 3 stages in 7 ticks"
    assert [line.split()[2:] for line in lines[3:6]] == [[*"01.01.."], [*".01.01."], [*"..01.01"]]
    assert lines[-1].endswith("leaves a stage idle in (p-g)/p = 1/3 of them: give 3 groups or more")
    full = output("--phase", "decode", "--pp", 2)
    assert full.endswith(
        "2 of 18 slots idle: 11.11 %, while the pipe fills and drains; with 2 groups it is full in between\n"
    )
    document = json.loads(output("--phase", "decode", "--groups", 1, "--json"))
    assert (document["groups"], document["idle_share"]) == (1, 0.75)
    assert document["ticks"] == decode_timetable(1, 4, 4).ticks


def test_a_model_has_stages_chunks_and_what_unequal_ones_save() -> None:
    arguments = ("llama-3.1-8b", "--pp", 8, "--context", 131072, "--chunk", 8192)
    out = output(*arguments)
    assert "prefill of llama-3.1-8b: 131072 tokens in 16 chunks through 8 stages in 23 ticks\n" in out
    assert "56 of 184 slots idle: 30.43 % = (p-1)/(m+p-1) = 7/23" in out
    assert "0      0-3         4      1.000" in out
    assert (
        "Each of 7 boundaries sends 67,108,864 bytes (64 MiB) an item: 8192 tokens of a chunk x 4096 in bfloat16" in out
    )
    assert "--chunk-parity 26624 runs levelled chunks\n" in out
    document = json.loads(output(*arguments, "--json"))
    assert (document["chunk_parity"], document["layers"], document["boundaries"]) == (26624, [4] * 8, 7)
    assert document["timetable"] == json.loads(
        json.dumps([[None if i < 0 else i for i in row] for row in prefill_timetable(16, 8).slots.tolist()])
    )
    saved = {
        way: {name: one["saved"] for name, one in part["schedules"].items()} for way, part in document["ways"].items()
    }
    assert set(saved["equal"].values()) == {0}
    assert saved["equal cost"]["free-running"] == pytest.approx(0.164, abs=2e-3)
    assert saved["levelled"]["one program"] == pytest.approx(0.092, abs=2e-3)


def test_decode_of_a_model_says_uneven_stages_and_the_bytes_of_a_boundary() -> None:
    arguments = ("--pp", 4, "--phase", "decode", "--groups", 1, "--batch", 48, "--stages", "17,17,17,10")
    out = output("deepseek-v3", *arguments)
    assert (
        "Each of 3 boundaries sends 688,128 bytes (672 KiB) an item: 48 requests of a group x 7168 in bfloat16" in out
    )
    document = json.loads(output("deepseek-v3", *arguments, "--json"))
    assert (document["layers"], document["boundary_bytes"]) == ([17, 17, 17, 10], 688_128)
    assert document["boundary_sent_bytes"] == 688_128
    assert max(document["stage_work"]) < 1.1 and document["stage_work"][3] < 0.75


def test_one_boundary_is_named_as_one_and_a_single_stage_has_none() -> None:
    assert "\nThe boundary sends 384 bytes" in output("tiny", "--pp", 2, "--phase", "decode")
    assert "sends" not in output("tiny", "--pp", 1, "--phase", "decode")


def test_chunks_that_save_nothing_are_not_advised() -> None:
    out = output("llama-3-70b", "--pp", 4)
    assert out.endswith("--chunk-parity 52224 runs levelled chunks, which save nothing here\n")


@pytest.mark.parametrize(
    ("phase", "batch", "context", "useful", "sent", "rows"),
    [
        ("decode", 36, 128, 147_456, 262_144, "9 requests of a group, 16 rows with padding,"),
        ("prefill", 1, 300, 4_915_200, 8_388_608, "300 tokens of a chunk, 512 rows with padding,"),
        ("prefill", 3, 40, 1_966_080, 4_194_304, "120 tokens of a chunk, 256 rows with padding,"),
    ],
)
def test_a_boundary_sends_the_rows_that_the_program_has_and_those_of_padding_are_named(
    phase: Phase, batch: int, context: int, useful: int, sent: int, rows: str
) -> None:
    of_phase = ("--groups", 4) if phase == "decode" else ("--context", context)
    arguments = ("llama-3-70b", "--pp", 4, "--phase", phase, "--batch", batch, *of_phase)
    out, document = output(*arguments), json.loads(output(*arguments, "--json"))
    assert f"sends {sent:,} bytes ({human_bytes(sent)}) an item, of which {useful:,} bytes" in out
    assert f"are no padding: {rows} x 8192 in bfloat16" in out
    assert (document["boundary_bytes"], document["boundary_sent_bytes"]) == (useful, sent)
    plan = Plan(MeshSpec(pp=4), microbatches=0 if phase == "decode" else 1, dtype="bfloat16")
    steps = make_steps(open_checkpoint(model_dir("llama-3-70b")).config, plan, phase, batch, context)
    assert {row.message_bytes for step in steps for row in send_recv.traffic(step)} == {sent}


def test_there_are_no_more_groups_than_requests() -> None:
    arguments = ("llama-3-70b", "--phase", "decode", "--groups", 8, "--batch", 2, "--rounds", 2)
    out = output(*arguments)
    assert out.startswith("decode of llama-3-70b: 2 tokens of each of 2 groups through 4 stages in 9 ticks\n")
    assert "leaves a stage idle in (p-g)/p = 2/4 of them: give 4 requests or more\n" in out
    assert json.loads(output(*arguments, "--json"))["groups"] == 2


def test_layers_of_one_window_need_no_unequal_chunks() -> None:
    out = output("mistral-7b", "--pp", 2, "--context", 16384)
    assert "No layer attends to all of the context: equal chunks cost the same" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--microbatches", 16),
        ("--phase", "decode", "--groups", 6),
        ("llama-3.1-8b", "--context", 8192),
    ],
)
def test_it_is_drawn(arguments: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    assert output(*arguments, "--png", path).endswith(f"\n{path} shows it\n")
    assert image.imread(path).shape[1] == 900


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "prefill has no item: give --microbatches, or a MODEL whose prompt is cut into chunks"),
        (("--pp", 0, "--microbatches", 4), "--pp 0: it must be from 1 to 256"),
        (("--microbatches", 5000), "--microbatches 5000: it must be from 1 to 4096"),
        (("--phase", "train"), "phase='train' is unknown: use prefill or decode"),
        (("--groups", 2, "--microbatches", 4), "--groups 2 is for --phase decode: leave it out"),
        (("--phase", "decode", "--microbatches", 4), "--microbatches 4 is for --phase prefill: leave it out"),
        (("--microbatches", 4, "--chunk", 512), "--chunk 512 is for a MODEL, such as llama-3-70b: leave it out"),
        (
            ("tiny", "--microbatches", 4),
            "--microbatches 4 is not for a MODEL, whose items are the chunks of --context: leave it out",
        ),
        (("tiny", "--context", 4096), "a prompt of 4096 tokens: the model's context has 1024; ask for 1 to so many"),
        (("llama-3.1-8b", "--pp", 4, "--stages", "8,8,8"), "stages=8,8,8 has 3 numbers for pp=4: give the layers"),
        (("llama-3.1-8b", "--pp", 4, "--stages", "8,8,8,9"), "stages=8,8,8,9 are 33 layers and the model has 32"),
        (
            ("llama-3.1-8b", "--context", 100000, "--chunk", 1),
            "--context 100000 in chunks of 1 is more than 4096 of them: use --chunk 25 or more",
        ),
        (
            ("--pp", 65, "--microbatches", 4, "--png", "x.png"),
            "x.png: 4 items through 65 stages are too many to draw: use at most 512 items and 64 stages",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments: tuple[object, ...], said: str) -> None:
    done = run("pipeline", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"jaxpar: {said}") and done.err.count("\n") == 1, done.err
