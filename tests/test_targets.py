"""Accelerators by name, none of which is there."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxpar.aot import targets
from jaxpar.aot.kinds import GPUS, gpu_target_config
from jaxpar.aot.targets import Target, require_compiler
from jaxpar.errors import MeshError
from jaxpar.mesh import MeshSpec
from jaxpar.presets import load_preset


@pytest.mark.parametrize(
    ("text", "platform", "size", "node"),
    [
        ("v5p:2x2x4", "tpu", 16, 16),
        ("v5p:8x8x8", "tpu", 512, 512),
        ("v5e:16x16", "tpu", 256, 256),
        ("v6e:2x4", "tpu", 8, 8),
        ("tpu7x:2x2x2", "tpu", 16, 16),
        ("h200:1x4x8", "gpu", 32, 8),
        ("h100:1x1x8", "gpu", 8, 8),
        ("b200:2x1x8", "gpu", 16, 8),
        ("h20:1x4x8", "gpu", 32, 8),
    ],
)
def test_a_target_is_read_with_its_devices_and_its_nodes(text: str, platform: str, size: int, node: int) -> None:
    target = Target.parse(text)
    assert (target.platform, target.size, target.kind.devices_per_node) == (platform, size, node)
    assert str(target) == text
    assert Target.parse(f" {text.upper()} ") == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown kind; use v5e, v5p, v6e, tpu7x, h100, h200, h20, b200"),
        ("a100:1x1x8", "unknown kind"),
        ("v5p", "'' is no shape"),
        ("v5p:2x2", "v5p has 3 dimensions; write v5p:4x4x4"),
        ("v5e:2x2x2", "v5e has 2 dimensions; write v5e:4x4"),
        ("h200:8", "'8' is no shape"),
        ("h200:4x8", "h200 has 3 dimensions"),
        ("h200:0x1x8", "'0x1x8' is no shape"),
        ("h200:1x1x-8", "'1x1x-8' is no shape"),
        ("h200:99999x999x8", "more than 65536 devices"),
    ],
)
def test_a_target_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(MeshError, match=r"^target ") as refused:
        Target.parse(text)
    assert said in str(refused.value)


def test_a_mesh_may_be_smaller_than_its_target_but_not_larger() -> None:
    target = Target.parse("h200:1x1x8")
    target.check(MeshSpec(tp=4))
    with pytest.raises(MeshError, match="mesh dp=2,tp=8 needs 16 devices and target h200:1x1x8 has 8"):
        target.check(MeshSpec(dp=2, tp=8))


@pytest.mark.parametrize(
    ("name", "preset"), [("v5p:4x4x4", "v5p-64"), ("h200:1x1x8", "h200-8"), ("h20:1x4x8", "h20-32")]
)
def test_a_target_has_the_figures_of_the_preset_with_its_devices(name: str, preset: str) -> None:
    kind, device = Target.parse(name).kind, load_preset(preset).device
    assert replace(kind, peak_fp8_flops=device.peak_fp8_flops) == device


@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("v5p:2x2x1", "libtpu", "tpu"), ("h200:1x1x8", "jax-cuda13-pjrt", "gpu-compile")],
)
def test_without_its_compiler_a_target_says_what_to_install(
    target: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(targets, "version", absent)
    with pytest.raises(MeshError) as refused:
        require_compiler(Target.parse(target))
    said = f"{package}, the compiler, is not installed: pip install 'jaxpar[{extra}]' (no accelerator is needed)"
    assert str(refused.value) == said


def test_a_gpu_compiler_of_another_version_than_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "version", lambda name: "0.12.0" if name == "jax" else "0.11.1")
    with pytest.raises(MeshError, match=r"jax-cuda13-pjrt 0\.11\.1 does not go with JAX 0\.12\.0.*==0\.12\.0$"):
        require_compiler(Target.parse("h200:1x1x8"))


def test_without_cudas_assembler_and_library_a_gpu_compiler_would_crash_and_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "version", lambda name: "0.12.0")
    monkeypatch.setattr(targets, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[tmp_path]))
    monkeypatch.setattr(targets, "CUDA", tmp_path / "none")
    with pytest.raises(MeshError, match=r"^ptxas and libdevice, .* pip install 'jaxpar\[gpu-compile\]'"):
        require_compiler(Target.parse("h200:1x1x8"))
    for needed in ("bin/ptxas", "nvvm/libdevice/libdevice.10.bc"):
        path = tmp_path / "cu13" / needed
        path.parent.mkdir(parents=True)
        path.touch()
    require_compiler(Target.parse("h200:1x1x8"))


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_described_with_its_own_figures(name: str) -> None:
    text = gpu_target_config(GPUS[name])
    assert f"core_count: {GPUS[name].cores} " in text and f"major: {GPUS[name].capability} " in text
    assert text.count("{") == text.count("}")
