"""`jaxpar doctor`: what a machine has, from descriptions of devices that need not be there, and what runs on it."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from command_line import run
from oracle_data import ROOT
from packaging.requirements import Requirement
from sample_models import write_model

from jaxpar.aot import targets
from jaxpar.aot.targets import Target, require_compiler
from jaxpar.applicable import WHOLE, every_way
from jaxpar.checkpoint import open_checkpoint
from jaxpar.cli.doctor import describe_machine
from jaxpar.devices import devices_at_hand
from jaxpar.doctor.machine import device_groups, preset_of
from jaxpar.doctor.packages import Compiler, find_compilers, find_extras, find_packages
from jaxpar.doctor.ways import ways_of
from jaxpar.errors import MeshError
from jaxpar.mesh import MeshSpec


def described(kind: str, platform: str, stats: dict[str, int] | None = None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"device_kind": kind, "platform": platform, "process_index": 0, "memory_stats": lambda: stats} | more
    )


# Devices


def test_devices_are_grouped_by_kind_with_the_memory_that_they_say_and_the_links_of_their_preset() -> None:
    stats = {"bytes_limit": 3 << 30, "bytes_in_use": 1 << 20}
    devices = [described("NVIDIA H200", "gpu", stats, slice_index=i // 8, process_index=i // 8) for i in range(16)]
    gpus, cpus = device_groups([*devices, described("cpu", "cpu")])
    assert (gpus.count, gpus.processes, gpus.slices, gpus.nodes, gpus.grid) == (16, 2, 2, 2, None)
    assert (gpus.memory_bytes, gpus.memory_in_use, gpus.preset) == (3 << 30, 1 << 20, "h200-8")
    assert gpus.figures is not None and gpus.figures.link_bandwidth == 450e9
    assert (cpus.platform, cpus.count, cpus.memory_in_use) == ("cpu", 1, None)


def test_a_device_that_does_not_say_what_memory_it_has_has_that_of_its_preset() -> None:
    chips = [described("TPU v5", "tpu", coords=[x, y, 0]) for x in range(2) for y in range(4)]
    (group,) = device_groups(chips)
    assert (group.preset, group.grid, group.memory_bytes) == ("v5p-64", (2, 4, 1), 95_000_000_000)


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("NVIDIA H200", "h200-8"),
        ("NVIDIA H200 141GB HBM3e", "h200-8"),
        ("NVIDIA H20", "h20-32"),
        ("NVIDIA H2000", None),
        ("NVIDIA", None),
        ("TPU v5", "v5p-64"),
    ],
)
def test_a_preset_knows_its_kind_by_whole_words(kind: str, preset: str | None) -> None:
    assert preset_of(kind)[0] == preset


def test_of_a_kind_without_a_preset_the_figures_of_the_target_of_its_name_are_known() -> None:
    (group,) = device_groups([described("NVIDIA H100 80GB HBM3", "gpu", {"bytes_limit": 60 << 30, "bytes_in_use": 0})])
    assert (group.preset, group.figures and group.figures.memory_bandwidth) == (None, 3.35e12)
    assert (
        describe_machine([group], [], [], [])
        .splitlines()[2]
        .startswith("              speed by its maker's figures: 989 TFLOP/s")
    )


def test_what_is_seen_of_an_accelerator_is_said_in_words() -> None:
    gpus = device_groups([described("NVIDIA H200", "gpu", {"bytes_limit": 1 << 37, "bytes_in_use": 0})] * 8)
    compilers = [Compiler("tpu", ("libtpu",), ""), Compiler("gpu", ("of-cuda",), "of-cuda is not installed")]
    said = describe_machine(gpus, find_packages(have()), [], compilers).splitlines()
    assert said[:4] == [
        "devices       8 x NVIDIA H200 by gpu, in one process",
        "              memory of each: 128 GiB, 0 B in use",
        "              speed by preset h200-8: 989 TFLOP/s in bfloat16, 4.8 TB/s of memory",
        "              links by preset h200-8: 450 GB/s one way among the 8 of a node, 50 between nodes; 1 node",
    ]
    assert said[-2:] == [
        "compiles for  tpu: by libtpu",
        "              gpu: no, of-cuda is not installed",
    ]


def test_a_kind_that_no_preset_knows_is_to_be_measured() -> None:
    said = describe_machine(device_groups([described("TPU v9", "tpu", coords=[1, 1])]), [], [], [])
    assert said.splitlines()[:2] == [
        "devices       1 x TPU v9 by tpu, in one process, chips 1x1",
        "              speed and links: no preset knows this kind; `jaxpar calibrate` measures them",
    ]


# Packages


def have(**versions: str) -> Any:
    found = {"jax": jax.__version__, "jaxlib": jax.__version__} | {
        name.replace("_", "-"): version for name, version in versions.items()
    }
    return found.get


def test_versions_are_held_against_those_that_the_installed_jax_asks_for() -> None:
    asked = [Requirement(text) for text in requires("jax") or []]
    libtpu = next(str(one.specifier) for one in asked if one.name == "libtpu")
    plugin = next(one.specifier for one in asked if one.name == "jax-cuda13-plugin")
    found = {one.name: one for one in find_packages(have(libtpu="0.0.1", jax_cuda13_plugin=jax.__version__))}
    assert (found["libtpu"].wanted, found["libtpu"].matches) == (libtpu, False)
    assert found["jax-cuda13-plugin"].matches == plugin.contains(jax.__version__)
    assert found["jaxlib"].matches and "jax-cuda12-plugin" not in found


def test_an_extra_is_installed_missing_or_of_another_version_and_says_of_what() -> None:
    def state(**versions: str) -> tuple[str, tuple[str, ...]]:
        extra = next(one for one in find_extras(have(requests="2.32", **versions)) if one.name == "tpu")
        return extra.state, extra.problems

    assert state() == ("not installed", ("libtpu is not installed",))
    old, (problem,) = state(libtpu="0.0.1")
    assert old == "other version" and problem.startswith("libtpu 0.0.1 is installed, and ==")
    wanted = problem.split("==")[1].split(".*")[0]
    assert state(libtpu=f"{wanted}.7") == ("installed", ())


def test_the_doctor_says_of_a_compiler_what_jaxpar_compile_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "libtpu":
            raise PackageNotFoundError(name)
        return "0.12.0" if name == "jax" else "0.11.1"

    monkeypatch.setattr(targets, "version", version)
    tpu, gpu = find_compilers()
    assert tpu.problem.startswith("libtpu, the compiler, is not installed") and "0.11.1 does not go" in gpu.problem
    for one, name in ((tpu, "v5p:2x2x1"), (gpu, "h200:1x1x8")):
        with pytest.raises(MeshError, match=f"^{re.escape(one.problem)}$"):
            require_compiler(Target.parse(name))


# Strategies


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_an_accelerator_runs_alone_before_it_runs_with_others() -> None:
    config = open_checkpoint(ROOT / "qwen3_moe").config
    several = every_way(config, 4, {})
    alone, *others = ways_of(config, "tpu", 4)
    assert (alone.sublayer, alone.plan and alone.plan.mesh, others) == (WHOLE, MeshSpec(), several)
    assert ways_of(config, "cpu", 4) == several
    assert [way.name for way in ways_of(config, "gpu", 1)] == ["one device"]


def test_devices_at_hand_are_all_or_as_many_as_asked_for() -> None:
    assert (len(devices_at_hand(None, None)), len(devices_at_hand("cpu", 3))) == (8, 3)
    with pytest.raises(MeshError, match=r"^devices=0: give 1 or more$"):
        devices_at_hand(None, 0)
    with pytest.raises(MeshError, match=r'^JAX has no tpu devices .*: use platform="cpu"$'):
        devices_at_hand("tpu", None)


def test_the_doctor_says_what_is_there_and_proves_what_can_run(model: Path) -> None:
    done = run("doctor", model, "--devices", "1", "--json")
    document = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    assert [(one["kind"], one["count"], one["nodes"]) for one in document["devices"]] == [("cpu", 1, 1)]
    assert document["packages"][0]["name"] == "jax" and document["host"]["cores"] > 0
    assert {one["platform"] for one in document["compilers"]} == {"tpu", "gpu"}
    (row,) = document["rows"]
    assert (row["strategy"], row["result"], row["ranks"]) == ("one device", "passed", 1)
    assert (row["wrong_tokens"], row["tolerance"]) == (0, 1e-4)
    assert (document["passed"], document["dtype"]) == (True, "float32")


def test_without_time_nothing_is_proved_and_the_status_says_so(model: Path) -> None:
    done = run("doctor", model, "--devices", "2", "--budget", "0")
    assert (done.status, done.err) == (1, "")
    assert done.out.startswith("devices       2 x cpu (faked) by cpu, in one process\n")
    assert done.out.splitlines()[-1].startswith(
        f"NOTHING RAN, so nothing is proved: {model} on 2 cpu devices against one of the CPU in float32: 0 passed"
    )


def test_quick_runs_nothing_and_needs_no_model() -> None:
    done = run("doctor", "no such model", "--quick")
    assert (done.status, done.err) == (0, "")
    assert "compiles for  tpu" in done.out and "passed" not in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quick", "--budget", "1"), "--quick runs nothing, and --budget says for how long to run: give either"),
        (("--budget", "-1"), "budget=-1.0: it must be 0 or above, and finite"),
        (("no such model",), "no model 'no such model'"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(options: tuple[str, ...], message: str) -> None:
    done = run("doctor", *options)
    assert done.status == 2 and done.err.startswith(f"jaxpar: {message}")
