"""What calibration measures becomes a preset that is read back as it was, or nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from command_line import run

from jaxpar.assets import model_dir
from jaxpar.calibrate.files import to_toml, write_preset
from jaxpar.calibrate.measure import calibrate, groups_of
from jaxpar.calibrate.overheads import overheads
from jaxpar.calibrate.result import Calibration, Overheads, Rate, Sample
from jaxpar.calibrate.steps import Run
from jaxpar.calibrate.sublayers import efficiency_of, trials
from jaxpar.checkpoint.hf_config import read_config
from jaxpar.errors import JaxparError
from jaxpar.ledger.steps import make_steps
from jaxpar.links import Fit
from jaxpar.mesh import MeshSpec
from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.timing import step_time
from jaxpar.presets import load_preset

H200 = load_preset("h200-8").device

FOUND = Calibration(
    mesh=MeshSpec(dp=2, tp=8),
    experts_over=("dp", "tp"),
    base=H200,
    rates=(
        Rate("bfloat16", 256, 1e-6, 400e12),
        Rate("bfloat16", 8192, 1e-3, 741.75e12),
        Rate("fp8", 8192, 1e-3, 1200e12),
        Rate("triad", 2**28, 1e-3, 4.32e12),
        Rate("weights", 2**28, 1e-3, 3.6e12),
    ),
    samples=(
        Sample.of("all_reduce", 8, "inside", (2**10, 2**15, 2**20), (10e-6, 11e-6, 42e-6)),
        Sample.of("all_to_all", 2, "across", (2**10, 2**20), (20e-6, 41e-6)),
    ),
    overheads=Overheads(step=1e-4, kernel=2e-6),
)


def test_a_calibration_is_a_preset_like_the_others(tmp_path: Path) -> None:
    write_preset(FOUND, tmp_path / "mine.toml", 'sixteen "H200"')
    preset = load_preset(tmp_path / "mine.toml")
    assert (preset.description, preset.mesh, preset.experts_over) == ('sixteen "H200"', FOUND.mesh, ("dp", "tp"))
    assert preset.device == FOUND.device
    assert [*tmp_path.iterdir()] == [tmp_path / "mine.toml"]


def test_efficiency_is_the_part_of_the_makers_peak_that_the_best_size_reaches() -> None:
    device = FOUND.device
    assert (device.peak_bf16_flops, device.peak_fp8_flops) == (989e12, 1200e12)
    assert device.efficiency == {"bfloat16": 0.75, "fp8": 1.0}
    assert (device.memory_bandwidth, device.memory_efficiency) == (4.8e12, 0.75)
    assert (device.step_overhead, device.kernel_overhead) == (1e-4, 2e-6)


def test_a_peak_that_was_passed_is_raised() -> None:
    device = replace(FOUND, base=replace(H200, peak_bf16_flops=1e12, memory_bandwidth=1e12)).device
    assert (device.peak_bf16_flops, device.memory_bandwidth) == (741.8e12, 4.32e12)
    assert device.efficiency["bfloat16"] == pytest.approx(1, abs=1e-3)


def test_a_fit_says_what_it_misses() -> None:
    sample = Sample.of("ppermute", 2, "inside", (2**10, 2**15, 2**20), (10e-6, 13e-6, 42e-6))
    assert sample.fit.error == pytest.approx(sum(map(abs, sample.misses)) / 3, rel=1e-2)


def test_a_mesh_of_one_device_has_no_collectives() -> None:
    text = to_toml(replace(FOUND, mesh=MeshSpec(), samples=()), "one")
    assert "[mesh]\ntp = 1\n" in text and "fits" not in text


def test_two_devices_are_measured() -> None:
    sizes = (2**10, 2**14)
    said: list[str] = []
    found = calibrate(
        MeshSpec(tp=2), None, "cpu", sizes, ("all_reduce", "ppermute"), enough=0, steps=False, say=said.append
    )
    assert [(one.collective, one.ranks, one.level, one.sizes) for one in found.samples] == [
        ("all_reduce", 2, "inside", sizes),
        ("ppermute", 2, "inside", sizes),
    ]
    assert all(seconds > 0 for sample in found.samples for seconds in sample.seconds)
    assert {rate.what for rate in found.rates} == {"bfloat16", "float32", "triad", "weights"}
    assert max(found.device.efficiency.values()) == 1 and 0 < found.device.memory_efficiency <= 1
    assert "all_reduce of 16 KiB over 2 ranks of a node" in said


def test_groups_are_consecutive_ranks_of_a_node_or_a_rank_of_each() -> None:
    assert [*groups_of(8, 8)] == [("inside", ranks, MeshSpec(dp=8 // ranks, tp=ranks)) for ranks in (2, 4, 8)]
    assert [*groups_of(12, 4)] == [
        ("inside", 2, MeshSpec(dp=6, tp=2)),
        ("inside", 4, MeshSpec(dp=3, tp=4)),
        ("across", 3, MeshSpec(dp=3, tp=4)),
    ]
    assert [*groups_of(1, 1)] == []


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("mine", "mine: a preset is a .toml file, such as mine.toml"),
        ("absent/mine.toml", "there is no folder"),
        ("folder.toml", "is not a file: name one that can be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, out: str, said: str
) -> None:
    (tmp_path / "folder.toml").mkdir()
    with patch("jaxpar.calibrate.measure.calibrate", side_effect=AssertionError("measured")):
        refused = run("calibrate", "--out", tmp_path / out)
    assert (refused.status, refused.out) == (2, "")
    assert said in refused.err and refused.err.count("\n") == 1


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    measuring = patch("jaxpar.calibrate.measure.calibrate", side_effect=AssertionError("measured"))
    with measuring, patch.dict("sys.modules", {"matplotlib": None}):
        refused = run("calibrate", "--out", tmp_path / "mine.toml", "--plot", tmp_path / "fits.png")
    assert refused.status == 2 and "pictures need matplotlib: pip install 'jaxpar[plot]'" in refused.err
    assert [*tmp_path.iterdir()] == []


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    with patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        write_preset(FOUND, tmp_path / "mine.toml", "half")
    with patch("os.replace", side_effect=OSError(28, "No space left on device")), pytest.raises(JaxparError) as refused:
        write_preset(FOUND, tmp_path / "mine.toml", "half")
    assert "mine.toml cannot be written: No space left on device" in str(refused.value)
    assert [*tmp_path.iterdir()] == []


def test_the_command_writes_tables_or_json_a_preset_and_a_picture(tmp_path: Path) -> None:
    out, plot = tmp_path / "mine.toml", tmp_path / "fits.png"
    with patch("jaxpar.calibrate.measure.calibrate", return_value=FOUND):
        shown = run("calibrate", "--out", out, "--plot", plot, "--mesh", "h200-8")
        document = json.loads(run("calibrate", "--out", out, "--json", "--mesh", "h200-8").out)
    assert (shown.status, shown.err) == (0, "")
    assert "all_reduce  inside      8" in shown.out and f"--mesh {out} takes it" in shown.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert document["device"]["fits"][0] == {
        "collective": "all_reduce",
        "ranks": 8,
        "level": "inside",
        "lines": [list(line) for line in FOUND.samples[0].fit.lines],
        "error": FOUND.samples[0].fit.error,
    }
    assert document["collectives"][1]["sizes"] == [2**10, 2**20]
    assert f"{FOUND.mesh}: 16 ranks" in run("mesh", out).out


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    with patch("jaxpar.calibrate.measure.calibrate") as measured:
        done = run("calibrate", "--out", out, "--plot", tmp_path / "absent" / "fits.png", "--mesh", "h200-8")
    assert done.status == 2 and "cannot be written" in done.err
    assert not measured.called and not out.exists()


def test_what_two_models_take_beyond_their_work_is_overhead_of_steps_and_of_kernels() -> None:
    config = replace(read_config(model_dir("llama-3.1-8b")), max_position_embeddings=256)
    runs = []
    for layers in (1, 4):
        of_layers = replace(config, num_hidden_layers=layers, windows=(None,) * layers)
        plan = Plan(MeshSpec(dp=8), dtype="bfloat16")
        (step,) = make_steps(of_layers, plan, "decode", 8, 32)
        taken = step_time(step, H200, Assumptions(kernel_overhead=2e-6, step_overhead=3e-4)).seconds
        runs.append(Run(of_layers, plan, "decode", 8, 32, taken))
    found = overheads(H200, runs)
    assert (found.kernel, found.step) == (pytest.approx(2e-6), pytest.approx(3e-4))
    # What is faster than predicted has no overhead; it is not below 0.
    assert overheads(H200, [replace(run, seconds=1e-9) for run in runs]) == Overheads(0.0, 0.0)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_what_a_part_of_a_model_reaches_is_found_from_a_step_of_which_the_rest_is_known(on_cpu: bool) -> None:
    kind = load_preset("laptop-8").device if on_cpu else H200
    device = replace(kind, efficiency={"bfloat16": 0.8, "attention": 0.25, "cache": 0.125, "experts": 0.5})
    for trial in trials(on_cpu):
        plan = Plan(MeshSpec.from_sizes({trial.axis: 8}), dtype="bfloat16", chunk=trial.tokens)
        requests = 8 * trial.requests
        (step,) = make_steps(trial.config, plan, trial.phase, requests, trial.tokens)
        taken = step_time(step, device, Assumptions(overlap=0)).seconds
        run = Run(trial.config, plan, trial.phase, requests, trial.tokens, taken)
        assert efficiency_of(trial, run, device) == pytest.approx(device.efficiency[trial.efficiency], rel=1e-3)
        assert efficiency_of(trial, replace(run, seconds=1e-9), device) == 1
        assert efficiency_of(trial, replace(run, seconds=1e9), device) == pytest.approx(1e-3)


def test_several_lines_are_written_and_read(tmp_path: Path) -> None:
    two = Fit("all_reduce", 8, "inside", ((3.25e-6, 2.4e-11), (3e-5, 3.9e-12)), 0.08)
    found = replace(FOUND, samples=(replace(FOUND.samples[0], fit=two),))
    write_preset(found, tmp_path / "mine.toml", "two")
    assert load_preset(tmp_path / "mine.toml").device.links.fits == (two,)
