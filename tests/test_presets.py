"""Deployments as TOML files, and everything that names a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxpar.errors import MeshError
from jaxpar.links import Fit, Links
from jaxpar.mesh import MeshSpec, rank_table
from jaxpar.presets import load_preset, preset_names, resolve_mesh

GOOD = """
description = "two of something"
experts_over = ["tp"]
[mesh]
tp = 2
[device]
kind = "something"
memory_bytes = 8e9
peak_bf16_flops = 1e12
memory_bandwidth = 1e11
link_bandwidth = 1e10
internode_bandwidth = 1e9
devices_per_node = 2
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_bundled_presets_are_these():
    assert preset_names() == ("h20-32", "h200-8", "h200-calibrated-8", "laptop-8", "sglang-16", "v5p-64")


@pytest.mark.parametrize(
    ("name", "mesh", "experts_over"),
    [
        ("laptop-8", "dp=2,tp=4", ("ep",)),
        ("h200-8", "tp=8", ("tp",)),
        ("h200-calibrated-8", "tp=8", ("tp",)),
        ("h20-32", "dp=4,tp=8", ("dp", "tp")),
        ("v5p-64", "dp=16,tp=4", ("dp", "tp")),
        ("sglang-16", "dp=2,cp=4,tp=2", ("dp", "cp", "tp")),
    ],
)
def test_a_bundled_preset_has_the_mesh_that_its_name_says(name: str, mesh: str, experts_over: tuple[str, ...]):
    preset = load_preset(name)
    assert (str(preset.mesh), preset.experts_over) == (mesh, experts_over)
    assert preset.name == name
    assert name.endswith(f"-{preset.mesh.size}")


# TFLOP/s, memory in GB, memory TB/s, link GB/s one way, GB/s between nodes, devices with fast links.
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("h200-8", (989, 141, 4.8, 450, 50, 8)),
        ("h200-calibrated-8", (989, 141, 4.8, 450, 50, 8)),
        ("h20-32", (148, 96, 4.0, 450, 50, 8)),
        ("v5p-64", (459, 95, 2.77, 600, 6.25, 64)),
        ("sglang-16", (989, 141, 4.8, 450, 50, 8)),
    ],
)
def test_the_figures_of_an_accelerator_are_those_that_its_maker_gives(name: str, figures: tuple[float, ...]):
    device = load_preset(name).device
    assert figures == (
        device.peak_bf16_flops / 1e12,
        device.memory_bytes / 1e9,
        device.memory_bandwidth / 1e12,
        device.link_bandwidth / 1e9,
        device.internode_bandwidth / 1e9,
        device.devices_per_node,
    )


def test_sglang_16_gives_every_rank_its_own_experts():
    preset = load_preset("sglang-16")
    assert [row.expert_rank for row in rank_table(preset.mesh, preset.experts_over)] == list(range(16))


def test_a_preset_is_read_from_any_toml_file(tmp_path: Path):
    preset = load_preset(write(tmp_path, GOOD))
    assert (preset.name, preset.description, preset.mesh) == ("mine", "two of something", MeshSpec(tp=2))
    assert preset.device.memory_bytes == 8_000_000_000
    assert isinstance(preset.device.memory_bytes, int)


def test_latencies_and_the_topology_have_defaults_and_reach_the_plan_with_the_bandwidths(tmp_path: Path):
    assert load_preset(write(tmp_path, GOOD)).plan_fields["links"] == Links(1e10, 10e-6, 1e9, 15e-6, "switch")
    text = GOOD + 'link_latency = 1e-6\ninternode_latency = 1e-3\ntopology = "torus"\n'
    assert load_preset(write(tmp_path, text)).plan_fields["links"] == Links(1e10, 1e-6, 1e9, 1e-3, "torus")
    assert load_preset("v5p-64").device.topology == "torus"


CALIBRATED = """
peak_fp8_flops = 2e12
efficiency = { bfloat16 = 0.8, fp8 = 0.5 }
memory_efficiency = 0.75
step_overhead = 1e-4
kernel_overhead = 0
[[device.fits]]
collective = "all_reduce"
ranks = 2
lines = [[3e-6, 1e-9], [9e-6, 0]]
error = 0.05
[[device.fits]]
collective = "all_to_all"
ranks = 4
level = "across"
lines = [[0, 1e-9]]
"""


def test_a_calibrated_preset_has_rates_and_fits(tmp_path: Path):
    device = load_preset(write(tmp_path, GOOD + CALIBRATED)).device
    assert [device.flops(dtype) for dtype in ("bfloat16", "float32", "fp8")] == [0.8e12, 1e12, 1e12]
    assert (device.memory_rate, device.step_overhead, device.kernel_overhead) == (0.75e11, 1e-4, 0)
    assert device.links.fits == (
        Fit("all_reduce", 2, "inside", ((3e-6, 1e-9), (9e-6, 0.0)), 0.05),
        Fit("all_to_all", 4, "across", ((0.0, 1e-9),)),
    )
    assert hash(device) == hash(load_preset(write(tmp_path, GOOD + CALIBRATED)).device)


def test_a_preset_that_says_nothing_of_efficiency_has_the_makers_figures(tmp_path: Path):
    device = load_preset(write(tmp_path, GOOD)).device
    assert (device.flops("bfloat16"), device.flops("fp8"), device.memory_rate) == (1e12, 1e12, 1e11)
    assert (device.step_overhead, device.kernel_overhead, device.links.fits) == (0, 0, ())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("bfloat16 = 0.8", "bfloat16 = 1.2", "bfloat16 is 1.2: expected a part of the peak, above 0 and at most 1"),
        ("bfloat16 = 0.8", "int4 = 0.8", "expected a table of parts of the peak, of bfloat16, float32, fp8, attention"),
        ("0.75", "-0.75", "memory_efficiency is -0.75: expected a part of the peak"),
        ("1e-4", "-1e-4", "step_overhead is -0.0001: expected a number above 0"),
        ('"all_to_all"', '"all_for_one"', "collective is 'all_for_one': expected 'all_reduce' or 'reduce_scatter' or"),
        ("ranks = 4", "ranks = 1", "ranks is 1: expected a whole number from 2"),
        ("ranks = 4", "", "device.fits.ranks is missing; give collective, lines, ranks"),
        ("ranks = 4", "ranks = 4\nmesh = 4", "unknown key 'device.fits.mesh'"),
        ('"across"', '"between"', "level is 'between': expected 'inside' or 'across'"),
        ("[[0, 1e-9]]", "[0, 1e-9]", "lines is [0, 1e-09]: expected pairs of seconds and seconds a byte"),
        ("[[0, 1e-9]]", "[]", "lines is []: expected pairs"),
        ("[[0, 1e-9]]", "[[0, -1e-9]]", "beta is -1e-09: expected a number above 0"),
        ("error = 0.05", "error = true", "error is True: expected a number"),
    ],
)
def test_bad_figures_of_a_calibration_are_refused(tmp_path: Path, old: str, new: str, said: str):
    assert CALIBRATED.count(old) == 1
    with pytest.raises(MeshError) as refused:
        load_preset(write(tmp_path, GOOD + CALIBRATED.replace(old, new)))
    assert said in str(refused.value)


def test_experts_are_over_ep_unless_a_preset_says_otherwise(tmp_path: Path):
    assert load_preset(write(tmp_path, GOOD.replace('experts_over = ["tp"]', ""))).experts_over == ("ep",)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tp = 2", "tp = 0", "mesh axis tp has size 0"),
        ("tp = 2", "tp = 2.0", "mesh axis tp has size 2.0"),
        ("tp = 2", "xp = 2", "unknown mesh axis 'xp'"),
        ("[mesh]\ntp = 2", "mesh = 2", "mesh is 2: expected a table, [mesh]"),
        ('"tp"]', '"xp"]', "unknown axis 'xp'"),
        ('["tp"]', '"tp"', "experts_over is 'tp': expected a list"),
        ('["tp"]', "[]", "name at least one"),
        ('description = "two of something"', "", "description is missing"),
        ('"two of something"', "2", "description is 2: expected a text"),
        ("link_bandwidth = 1e10", "", "device.link_bandwidth is missing"),
        ("link_bandwidth = 1e10", "link_bandwidth = 1e10\nlinks = 6", "unknown key 'device.links'"),
        ("description", "colour = 1\ndescription", "unknown key 'colour'"),
        ("memory_bytes = 8e9", "memory_bytes = -8e9", "memory_bytes is -8000000000.0: expected a number above 0"),
        ("memory_bytes = 8e9", "memory_bytes = 0.5", "memory_bytes is 0.5: expected a whole number"),
        ("memory_bytes = 8e9", 'memory_bytes = "8 GB"', "memory_bytes is '8 GB': expected a number"),
        ("1e12", "inf", "peak_bf16_flops is inf: expected a number"),
        ("1e12", "nan", "peak_bf16_flops is nan: expected a number"),
        ("1e12", "1" + "0" * 400, "expected a number"),
        ("1e12", "true", "peak_bf16_flops is True: expected a number"),
        ("link_bandwidth = 1e10", "link_bandwidth = 1e10\nlink_latency = 0", "link_latency is 0: expected a number"),
        (
            "link_bandwidth = 1e10",
            'link_bandwidth = 1e10\ntopology = "mesh"',
            "topology is 'mesh': expected 'switch' or",
        ),
        ("[mesh]", "[mesh", "not a TOML file"),
    ],
)
def test_a_bad_preset_is_refused_with_its_file_key_and_value(tmp_path: Path, old: str, new: str, said: str):
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(MeshError) as refused:
        load_preset(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert str(refused.value).count(str(path)) == 1
    assert said in str(refused.value)


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path):
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in [
        (binary, "not a TOML file"),
        (tmp_path / "absent.toml", "No such file"),
        (tmp_path, "no mesh preset"),
    ]:
        with pytest.raises(MeshError, match=said):
            load_preset(path)


@pytest.mark.parametrize("name", ["h100-8", "", "../meshes/h20-32", "H20-32"])
def test_a_preset_that_is_not_there_lists_those_that_are(name: str):
    with pytest.raises(MeshError, match="use one of h20-32, h200-8, h200-calibrated-8, laptop-8, sglang-16, v5p-64"):
        load_preset(name)


def test_a_mesh_is_named_by_a_spec_a_preset_a_file_a_mapping_or_an_object(tmp_path: Path):
    path = write(tmp_path, GOOD)
    preset = load_preset(path)
    assert resolve_mesh("dp=2,tp=4") == (MeshSpec(dp=2, tp=4), None)
    assert resolve_mesh({"dp": 2, "tp": 4}) == (MeshSpec(dp=2, tp=4), None)
    assert resolve_mesh(MeshSpec(cp=2)) == (MeshSpec(cp=2), None)
    assert resolve_mesh("h20-32") == (MeshSpec(dp=4, tp=8), load_preset("h20-32"))
    assert resolve_mesh(path) == resolve_mesh(str(path)) == resolve_mesh(preset) == (MeshSpec(tp=2), preset)


def test_a_path_with_an_equals_sign_is_still_a_path(tmp_path: Path):
    folder = tmp_path / "run=1"
    folder.mkdir()
    assert resolve_mesh(str(write(folder, GOOD)))[0] == MeshSpec(tp=2)


def test_a_word_that_is_no_preset_is_told_both_ways_to_name_a_mesh():
    with pytest.raises(MeshError) as refused:
        resolve_mesh("h100-8")
    assert "dp=2,tp=4" in str(refused.value)
    assert "h200-8" in str(refused.value)


@pytest.mark.parametrize("mesh", [None, 3, b"tp=2", ["tp", 2]])
def test_what_is_no_name_of_a_mesh_is_told_what_is(mesh: object):
    with pytest.raises(MeshError, match=r'^mesh=.*: give axis sizes such as "dp=2,tp=4", a preset or a \.toml file$'):
        resolve_mesh(mesh)
