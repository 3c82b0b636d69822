"""`jaxpar layout`: who holds which positions, what it costs them, and the picture of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run
from matplotlib import image

from jaxpar.layout import LAYOUTS, causal_work, deal

PICTURE = ("layout", "zigzag", "--cp", 3, "--length", 20)


def table_rows(out: str, header: str) -> list[list[str]]:
    """The cells of the table under `header`."""
    lines = out.split("\n")
    start = next(i for i, line in enumerate(lines) if line.split() == header.split())
    return [line.split() for line in lines[start + 1 : lines.index("", start)]]


def positions(*arguments: object) -> list[str]:
    """What stands under "positions"."""
    lines = run("layout", *arguments).out.splitlines()
    at = lines[2].index("positions")
    end = lines[2].index("tokens")
    return [line[at:end].strip() for line in lines[3 : lines.index("", 3)]]


def test_zigzag_over_four_ranks_is_even_in_tokens_and_pairs_and_steps() -> None:
    done = run("layout", "zigzag", "--cp", 4, "--length", 32)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("zigzag: 32 tokens over 4 ranks\n\n")
    assert table_rows(done.out, "rank positions tokens padding") == [
        ["0", "0-3,", "28-31", "8", "0"],
        ["1", "4-7,", "24-27", "8", "0"],
        ["2", "8-11,", "20-23", "8", "0"],
        ["3", "12-19", "8", "0"],
    ]
    even = ["36", "32", "32", "32", "132"]
    assert table_rows(done.out, "rank step 0 step 1 step 2 step 3 all steps") == [
        [name, *even] for name in ("0", "1", "2", "3", "slowest")
    ]
    assert done.out.endswith(
        "\n528 pairs, 132 a rank in the mean\n"
        "the slowest rank: 132, 1.00000 times the mean\n"
        "in lock-step, the slowest rank of each ring step: 132, 1.00000 times the mean\n"
    )


def test_ranks_that_are_slow_at_different_steps_cost_more_in_lock_step_than_any_of_them() -> None:
    out = run("layout", "zigzag", "--cp", 3, "--length", 32).out
    assert out.endswith(
        "\n528 pairs, 176 a rank in the mean\n"
        "the slowest rank: 182, 1.03409 times the mean\n"
        "in lock-step, the slowest rank of each ring step: 192, 1.09091 times the mean\n"
    )


def test_padding_fills_ranks_up_to_the_longest() -> None:
    out = run("layout", "zigzag", "--cp", 4, "--length", 19).out
    assert [row[-2:] for row in table_rows(out, "rank positions tokens padding")] == [["5", "0"]] * 3 + [["4", "1"]]


def test_positions_are_shown_as_runs_and_many_by_the_first_and_the_last() -> None:
    assert positions("striped", "--cp", 2, "--length", 7) == ["0, 2, 4, 6", "1, 3, 5"]
    assert positions("striped", "--cp", 4, "--length", 10**6)[3] == "3, 7, 11, ..., 999999"
    assert positions("striped", "--cp", 2, "--length", 130, "--cp-interleave", 64) == ["0-63, 128-129", "64-127"]
    assert positions("striped", "--cp", 3, "--length", 100, "--cp-interleave", 4)[0] == "0-3, 12-15, 24-27, ..., 96-99"
    assert positions("contiguous", "--cp", 3, "--length", 2) == ["0", "1", "-"]


def test_many_ring_steps_are_cut_in_the_table_and_whole_in_json() -> None:
    arguments = ("layout", "striped", "--cp", 20, "--length", 40)
    first = next(line for line in run(*arguments).out.splitlines() if line.startswith("rank  ") and "step" in line)
    assert first.split("  ")[-3:] == ["...", "step 19", "all steps"]
    assert len(json.loads(run(*arguments, "--json").out)["ranks"][0]["work"]) == 20


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_has_every_position_and_pair(layout: str) -> None:
    done = run("layout", layout, "--cp", 3, "--length", 20, "--window", 7, "--json")
    document = json.loads(done.out)
    held = deal(layout, 0, 20, 3)
    work = causal_work(held, 7)
    assert {name: document[name] for name in ("layout", "cp", "length", "cp_interleave", "window")} == {
        "layout": layout,
        "cp": 3,
        "length": 20,
        "cp_interleave": 1,
        "window": 7,
    }
    for rank, row in enumerate(document["ranks"]):
        assert row["rank"] == rank
        assert row["positions"] == held[rank].tolist()
        assert (row["tokens"], row["tokens"] + row["padding"]) == (len(held[rank]), max(map(len, held)))
        assert row["work"] == work[rank].tolist()
    total = 7 * 20 - 7 * 6 // 2
    assert document["work"] == {
        "total": total,
        "mean": total / 3,
        "largest": work.sum(axis=1).max(),
        "largest_over_mean": work.sum(axis=1).max() / (total / 3),
        "slowest_of_each_step": work.max(axis=0).tolist(),
        "lock_step": work.max(axis=0).sum(),
        "lock_step_over_mean": work.max(axis=0).sum() / (total / 3),
    }
    assert "png" not in document


def test_a_picture_has_every_pair_in_the_colour_of_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "zigzag.png"
    done = run(*PICTURE, "--window", 9, "--png", path)
    assert (done.status, done.err) == (0, "")
    assert done.out.endswith(f"\n{path} shows them\n")
    assert [file.name for file in tmp_path.iterdir()] == ["zigzag.png"]
    pixels = np.rint(image.imread(path)[..., :3] * 255).astype(int)
    work = causal_work(deal("zigzag", 0, 20, 3), 9).sum(axis=1)
    side = 13  # pixels of a pair: 20 of them are the first width past 256
    for rank, rgb in enumerate([(31, 119, 180), (255, 127, 14), (44, 160, 44)]):
        in_legend = (pixels == rgb).all(axis=-1).sum() - side**2 * work[rank]
        assert 100 < in_legend < 300  # less and more by a pair of 169
    grey = (pixels == 228).all(axis=-1).sum()
    assert 100 < grey - 2 * side**2 * work.sum() < 300, "a pair is grey at all steps but one"


def test_a_picture_of_one_pair_and_the_largest_one_are_drawn(tmp_path: Path) -> None:
    for name, *arguments in (("small", 1, 1), ("large", 16, 512)):
        path = tmp_path / f"{name}.png"
        cp, length = arguments
        document = json.loads(run("layout", "striped", "--cp", cp, "--length", length, "--png", path, "--json").out)
        assert document["png"] == str(path)
        assert image.imread(path).shape[0] > 256


def refusal(*arguments: object) -> str:
    done = run("layout", *arguments)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("jaxpar: ") and done.err.count("\n") == 1, done.err
    return done.err.removeprefix("jaxpar: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("diagonal", "--cp", 4, "--length", 32), "layout='diagonal' is not a layout: use contiguous, zigzag, striped"),
        (("zigzag", "--cp", 0, "--length", 32), "--cp 0: it must be from 1 to 256"),
        (("zigzag", "--cp", 257, "--length", 32), "--cp 257: it must be from 1 to 256"),
        (("zigzag", "--cp", 4, "--length", 0), "--length 0: it must be from 1 to 1048576"),
        (("zigzag", "--cp", 4, "--length", 10**30), f"--length {10**30}: it must be from 1 to 1048576"),
        (
            ("striped", "--cp", 4, "--length", 32, "--cp-interleave", -1),
            "--cp-interleave -1: it must be from 1 to 1048576",
        ),
        (("zigzag", "--cp", 4, "--length", 32, "--window", 0), "--window 0: it must be from 1 to 1048576"),
        (
            ("zigzag", "--cp", 4, "--length", 32, "--cp-interleave", 2),
            "--cp-interleave 2: zigzag has no stripes; leave it out, or use striped",
        ),
        (
            ("zigzag", "--cp", 4, "--length", 513, "--png", "x.png"),
            "x.png: 513 tokens over 4 ranks are too many to draw: use at most 512 tokens and 16 ranks",
        ),
        (
            ("zigzag", "--cp", 17, "--length", 32, "--png", "x.png"),
            "x.png: 32 tokens over 17 ranks are too many to draw: use at most 512 tokens and 16 ranks",
        ),
        (("zigzag", "--cp", "x", "--length", 32), "Invalid value for '--cp': "),
        (("zigzag", "--cp", 4), "Missing option '--length'"),
        (("--cp", 4, "--length", 32), "Missing argument 'LAYOUT'"),
    ],
)
def test_what_cannot_be_dealt_or_drawn_is_refused(arguments: tuple[object, ...], said: str) -> None:
    assert refusal(*arguments).startswith(said)


def test_a_picture_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    said = {
        tmp_path / "absent" / "x.png": "cannot be written: No such file or directory; name another file",
        tmp_path / "file" / "x.png": "cannot be written: Not a directory; name another file",
        tmp_path / ("x" * 300): "cannot be written: File name too long; name another file",
        tmp_path / "folder": "is not a file: name one that can be written",
        Path("/dev/null"): "is not a file: name one that can be written",
    }
    for path, text in said.items():
        assert refusal(*PICTURE[1:], "--png", path) == f"{path} {text}"
    assert refusal(*PICTURE[1:], "--png", "") == ". is not a file: name one that can be written"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_disk_that_fills_up_leaves_the_older_picture_and_no_half_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.png"
    path.write_text("older")

    def fail(figure: object, part: Path, **options: object) -> None:
        part.write_bytes(b"\x89PNG")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert refusal(*PICTURE[1:], "--png", path) == (
        f"{path} cannot be written: No space left on device; name another file"
    )
    assert [file.read_text() for file in tmp_path.iterdir()] == ["older"]


def test_a_picture_without_matplotlib_is_refused_and_figures_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "x.png"
    assert refusal(*PICTURE[1:], "--png", path) == f"{path}: pictures need matplotlib: pip install 'jaxpar[plot]'"
    assert run(*PICTURE).status == 0
