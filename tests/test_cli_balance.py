"""`jaxpar balance`: loads of devices before and after, copies, the heat map, and files that are no loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Result, run
from matplotlib import image

from jaxpar.moe.balance import in_order, place

LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
WANTED = "give a list for each layer of a number for each expert, [[3, 1, 2], [0, 4, 2]]"


@pytest.fixture
def balance(tmp_path: Path) -> Callable[..., Result]:
    """Run the command on loads, or on the text of a file of them."""

    def call(loads: Any, *arguments: object) -> Result:
        (tmp_path / "loads.json").write_text(loads if isinstance(loads, str) else json.dumps(loads))
        return run("balance", "--loads", tmp_path / "loads.json", *arguments)

    return call


def test_the_report_has_every_device_before_and_after_and_the_copies(balance: Callable[..., Result]) -> None:
    done = balance(LOADS, "--slots", 16, "--devices", 8, "--groups", 4, "--nodes", 2)
    assert (done.status, done.err) == (0, "")
    head, _, said, _, columns, *rows, _, copied, _, first, second, _, worst, _ = done.out.split("\n")
    assert head == "12 experts on 16 slots of 8 devices, 4 groups on 2 nodes: hierarchical"
    assert said == "Load of each device, before (experts in order, no copies) and after"
    assert columns.split() == ["layer", *(word for device in range(8) for word in ("device", str(device))), "max/mean"]
    assert [" ".join(row.split()) for row in rows] == [
        "0 before 222 101 269 43 73 56 183 86 2.083",
        "after 121.5 86.5 125 113 147.5 131.5 156 152 1.208",
        "1 before 127 168 216 344 172 86 16 27 2.381",
        "after 173 179.5 120.5 172 123 152 118.5 117.5 1.242",
    ]
    assert copied == "Experts that have copies, and how many slots each"
    assert first == "layer 0: 1 x2, 4 x2, 5 x2, 10 x2"
    assert second == "layer 1: 1 x2, 5 x2, 6 x2, 8 x2"
    assert worst == "max/mean of the worst layer: 2.381 before, 1.242 after"


def test_without_groups_and_nodes_the_policy_is_global(balance: Callable[..., Result]) -> None:
    out = balance([[120, 40, 20, 20]], "--slots", 8, "--devices", 4).out
    assert out.startswith("4 experts on 8 slots of 4 devices: global\n")
    assert "after         50        50        50        50     1.000" in out
    assert "\nlayer 0: 0 x4, 1 x2\n" in out


def test_experts_that_devices_do_not_divide_and_slots_for_no_copies(balance: Callable[..., Result]) -> None:
    done = balance([[1, 2, 4, 8, 16, 32]], "--slots", 6, "--devices", 3)
    assert "\nlayer 0: -\n" in done.out
    document = json.loads(balance([[1, 2, 4, 8, 16]], "--slots", 8, "--devices", 4, "--json").out)
    assert document["layers"][0]["before"]["loads"] == [3, 4, 8, 16]


def test_many_devices_are_cut_in_the_table_and_whole_in_json(balance: Callable[..., Result]) -> None:
    loads = [[*range(64)], [0] * 64]
    arguments = ("--slots", 80, "--devices", 20)
    lines = balance(loads, *arguments).out.splitlines()
    assert lines[4].split("  ")[-3:] == ["...", "device 19", "max/mean"]
    assert lines[5].split()[-3:] == ["...", "186", "1.845"]  # 61 + 62 + 63, of a mean of 100.8
    document = json.loads(balance(loads, *arguments, "--json").out)
    assert [len(layer["after"]["loads"]) for layer in document["layers"]] == [20, 20]
    assert document["layers"][1]["before"]["largest_over_mean"] == 1


def test_json_has_the_placement(balance: Callable[..., Result]) -> None:
    document = json.loads(balance(LOADS, "--slots", 16, "--devices", 8, "--groups", 4, "--nodes", 2, "--json").out)
    placed, before = place(LOADS, 16, 8, 4, 2), in_order(LOADS, 8)
    layers = document.pop("layers")
    assert document == {"slots": 16, "devices": 8, "groups": 4, "nodes": 2, "policy": "hierarchical"}
    for layer, row in enumerate(layers):
        after, mean = placed.device_loads[layer], sum(LOADS[layer]) / 8
        assert row == {
            "layer": layer,
            "mean": mean,
            "before": {"loads": before[layer].tolist(), "largest_over_mean": pytest.approx(before[layer].max() / mean)},
            "after": {"loads": after.tolist(), "largest_over_mean": pytest.approx(after.max() / mean)},
            "copies": placed.copies[layer].tolist(),
            "slots": placed.slots[layer].tolist(),
        }


def test_large_and_small_loads_are_shown_in_figures_that_can_be_read(balance: Callable[..., Result]) -> None:
    out = balance([[123456789, 0.001234567, 10**300, 7]], "--slots", 4, "--devices", 4).out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("after"))
    assert row.split() == ["after", "123456789", "0.00123457", "1e+300", "7", "4.000"]


# The picture


def test_the_heat_map_has_every_load_before_and_after(balance: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    loads = [[120, 40, 20, 20], [0, 0, 0, 0]]  # over the mean 2.4 0.8 0.4 0.4, then 1 on every device as in layer 1
    done = balance(loads, "--slots", 8, "--devices", 4, "--png", path)
    assert (done.status, done.err) == (0, "")
    assert done.out.endswith(f"\n{path} shows the loads\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["loads.json", "map.png"]
    pixels = np.rint(image.imread(path)[..., :3] * 255).astype(int)
    cell = 96 * 48
    for rgb, cells in {(103, 0, 31): 1, (67, 147, 195): 2, (247, 246, 246): 12}.items():  # dark red, blue, white
        assert cells <= (pixels == rgb).all(axis=-1).sum() / cell < cells + 0.1


def test_one_load_and_many_layers_and_many_devices_are_drawn(balance: Callable[..., Result], tmp_path: Path) -> None:
    for layers, devices in ((1, 1), (256, 2), (2, 512)):
        path = tmp_path / "map.png"
        loads = [[1] * devices] * layers
        document = json.loads(balance(loads, "--slots", devices, "--devices", devices, "--png", path, "--json").out)
        assert document["png"] == str(path)
        height, width, _ = image.imread(path).shape
        assert width > devices and height > layers
    done = balance([[1]], "--slots", 513, "--devices", 513, "--png", tmp_path / "x.png")
    assert done.err == f"jaxpar: {tmp_path / 'x.png'}: 513 devices are too many to draw: use at most 512\n"


def test_a_picture_that_cannot_be_drawn_or_written_leaves_nothing(
    balance: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (LOADS, "--slots", 16, "--devices", 8, "--png")
    absent = tmp_path / "absent" / "x.png"
    done = balance(*arguments, absent)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"jaxpar: {absent} cannot be written: No such file or directory; name another file\n"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = balance(*arguments, tmp_path / "x.png")
    assert (done.status, done.out) == (2, "")
    assert done.err == f"jaxpar: {tmp_path / 'x.png'}: pictures need matplotlib: pip install 'jaxpar[plot]'\n"
    assert [file.name for file in tmp_path.iterdir()] == ["loads.json"]


# Refusals


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ("", "is not JSON (Expecting value: line 1 column 1 (char 0)): " + WANTED),
        ("[[1, 2]", "is not JSON (Expecting ',' delimiter: line 1 column 8 (char 7)): " + WANTED),
        ("[" * 100_000, "is not JSON (maximum recursion depth exceeded"),
        (f"[[{'9' * 5000}]]", "is not JSON (Exceeds the limit (4300 digits)"),
        ("{}", "holds {}: " + WANTED),
        ("[]", "holds []: " + WANTED),
        ("[1, 2]", ": layer 0 is 1: " + WANTED),
        ("[[1, 2], []]", ": layer 1 is []: " + WANTED),
        ("[[1, 2], [1, 2, 3]]", ": layer 1 has 3 experts and layer 0 has 2: every layer has as many"),
        ("[[1, 2], [1, [2]]]", ": layer 1, expert 1 is [2]: a load is a number from 0"),
        ('[[1, "2"]]', ": layer 0, expert 1 is '2': a load is a number from 0"),
        ("[[1, true]]", ": layer 0, expert 1 is True: a load is a number from 0"),
        ("[[1, null]]", ": layer 0, expert 1 is None: a load is a number from 0"),
        ("[[1, -2]]", ": layer 0, expert 1 has the load -2.0: it must be from 0, and finite"),
        ("[[1, NaN]]", ": layer 0, expert 1 has the load nan: it must be from 0, and finite"),
        ("[[1, 1e999]]", ": layer 0, expert 1 has the load inf: it must be from 0, and finite"),
        (f"[[1, {10**400}]]", "holds a load that no float64 can: give loads in a larger unit"),
        ("[[1e308, 1e308]]", ": loads up to 1e+308 add up to infinity: give them in a larger unit"),
        (json.dumps([[1]] * 257), ": loads are of 257 layers and 1 expert: give at most 256 layers and 2048 experts"),
    ],
)
def test_a_file_that_holds_no_loads_is_refused(
    balance: Callable[..., Result], tmp_path: Path, loads: str, said: str
) -> None:
    done = balance(loads, "--slots", 4, "--devices", 2, "--png", tmp_path / "x.png")
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.removeprefix(f"jaxpar: {tmp_path / 'loads.json'}").lstrip().startswith(said), done.err
    assert [file.name for file in tmp_path.iterdir()] == ["loads.json"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(path: Path) -> str:
        done = run("balance", "--loads", path, "--slots", 4, "--devices", 2)
        assert (done.status, done.out) == (2, "")
        return done.err

    absent = tmp_path / "absent.json"
    assert refusal(absent) == f"jaxpar: {absent} cannot be read: No such file or directory; name a file of loads\n"
    assert refusal(tmp_path) == f"jaxpar: {tmp_path} is not a file: {WANTED}\n"
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\xfa")
    assert refusal(tmp_path / "bytes.json").startswith(f"jaxpar: {tmp_path / 'bytes.json'} is not JSON (")
    monkeypatch.setattr("jaxpar.moe.loads._MAX_BYTES", 2)
    assert refusal(tmp_path / "bytes.json") == f"jaxpar: {tmp_path / 'bytes.json'} has 3 bytes: loads take at most 2\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slots", 15, "--devices", 8), "15 slots on 8 devices: each has as many; use a multiple of 8, such as 16"),
        (("--slots", 8, "--devices", 8), "8 slots for 12 experts: use 12 or more"),
        (("--slots", 10**30, "--devices", 8), f"slots={10**30}: it must be a whole number from 1 to 4096"),
        (("--slots", 16, "--devices", 0), "devices=0: it must be a whole number from 1 to 4096"),
        (
            ("--slots", 16, "--devices", 8, "--groups", 0, "--nodes", 2),
            "groups=0: it must be a whole number from 1 to 4096",
        ),
        (
            ("--slots", 18, "--devices", 9, "--groups", 4, "--nodes", 3),
            "4 groups on 3 nodes: a group stays on one node, and each has as many; "
            "use a multiple of 3 groups, or leave groups and nodes out for the global policy",
        ),
        (
            ("--slots", 16, "--devices", 8, "--groups", 4),
            "--groups and --nodes make the policy hierarchical together: give both, or neither for global",
        ),
        (
            ("--slots", 16, "--devices", 8, "--nodes", 1),
            "--groups and --nodes make the policy hierarchical together: give both, or neither for global",
        ),
        (("--slots", 16), "Missing option '--devices'"),
        (("--slots", "x", "--devices", 8), "Invalid value for '--slots'"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    balance: Callable[..., Result], arguments: tuple[object, ...], said: str
) -> None:
    done = balance(LOADS, *arguments)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"jaxpar: {said}"), done.err


def test_balancing_does_not_import_jax(fresh_python: Callable[..., str]) -> None:
    code = """
import pathlib, sys
pathlib.Path("l.json").write_text("[[3, 1, 2], [0, 4, 2]]")
sys.argv = "jaxpar balance --loads l.json --slots 4 --devices 2 --json".split()
import jaxpar.cli
try:
    jaxpar.cli.main()
except SystemExit as done:
    print(done.code, sorted({"jax", "flax", "matplotlib"} & sys.modules.keys()))
"""
    assert fresh_python(code).endswith("\n0 []\n")
