"""Devices for a mesh: how many there are, and in which order they are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxpar.devices import MAX_FAKED_DEVICES, ensure_devices, make_mesh
from jaxpar.errors import MeshError
from jaxpar.mesh import AXES, MeshSpec

COUNT_DEVICES = """
import jax
from jaxpar.devices import ensure_devices
from jaxpar.mesh import MeshSpec
{first}
ensure_devices(MeshSpec.parse({mesh!r}))
print(len(jax.devices()))
"""


@dataclass(frozen=True)
class Gpu:
    """What JAX tells of a GPU; `slice_index` is its NVLink domain."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


@dataclass(frozen=True)
class Tpu:
    """What JAX tells of a v5p chip in a lone slice; a process has the four chips of one host."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


@dataclass(frozen=True)
class SlicedTpu(Tpu):
    """A chip of one slice out of several."""

    slice_index: int = 0


def torus(x: int, y: int, z: int) -> list[Tpu]:
    coordinates = [(i, j, k) for k, j, i in product(range(z), range(y), range(x))]
    return [Tpu(id=i, coords=c, process_index=i // 4) for i, c in enumerate(coordinates)]


def test_a_mesh_has_all_five_axes_with_tp_innermost():
    spec = MeshSpec(dp=2, tp=4)
    mesh = make_mesh(spec, ensure_devices(spec))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == spec.sizes
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert [device.id for device in mesh.devices[0, 1, 0, 0]] == [4, 5, 6, 7]


def test_a_mesh_smaller_than_the_machine_takes_the_first_devices():
    assert ensure_devices(MeshSpec(dp=3)) == jax.devices()[:3]
    assert ensure_devices(MeshSpec(), platform="cpu") == jax.devices()[:1]


def test_a_mesh_wants_exactly_its_number_of_devices():
    with pytest.raises(MeshError, match="needs 2 devices, got 8"):
        make_mesh(MeshSpec(tp=2), jax.devices())


def test_too_few_devices_after_jax_has_started_names_both_numbers_and_the_remedy():
    with pytest.raises(MeshError) as refused:
        ensure_devices(MeshSpec(dp=2, tp=8))
    assert "needs 16 devices and JAX has already started with 8" in str(refused.value)
    assert 'jax.config.update("jax_num_cpu_devices", 16)' in str(refused.value)


def test_more_devices_than_can_be_faked_are_refused():
    with pytest.raises(MeshError, match=f"at most {MAX_FAKED_DEVICES} can be faked"):
        ensure_devices(MeshSpec(dp=MAX_FAKED_DEVICES + 1))


@pytest.mark.parametrize("platform", ["gpu", "abacus"])
def test_a_platform_that_is_not_there_is_refused_in_one_line(platform: str):
    with pytest.raises(MeshError, match=f"JAX has no {platform} devices") as refused:
        ensure_devices(MeshSpec(), platform=platform)
    assert "\n" not in str(refused.value)


def test_more_accelerators_than_the_machine_has_names_both_numbers_and_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda platform: [Gpu(id=i, slice_index=0) for i in range(4)])
    with pytest.raises(MeshError) as refused:
        ensure_devices(MeshSpec(tp=8))
    assert "needs 8 devices and this machine has 4 (NVIDIA H200)" in str(refused.value)
    assert 'platform="cpu"' in str(refused.value)


def test_importing_does_not_start_the_backend_so_that_devices_can_still_be_faked(fresh_python):
    code = COUNT_DEVICES.format(first="import jaxpar, jaxpar.presets, jaxpar.assets", mesh="dp=2,tp=6")
    assert fresh_python(code) == "12\n"


def test_a_larger_count_that_the_program_has_set_is_left_alone(fresh_python):
    first = 'jax.config.update("jax_num_cpu_devices", 6)'
    assert fresh_python(COUNT_DEVICES.format(first=first, mesh="tp=2")) == "6\n"


def test_a_larger_count_in_the_xla_flag_is_left_alone_and_a_smaller_one_is_raised(fresh_python):
    flag = "--xla_force_host_platform_device_count=5"
    assert fresh_python(COUNT_DEVICES.format(first="", mesh="tp=2"), XLA_FLAGS=flag) == "5\n"
    assert fresh_python(COUNT_DEVICES.format(first="", mesh="tp=7"), XLA_FLAGS=flag) == "7\n"


def test_gpus_of_one_node_are_laid_out_by_id_whatever_order_jax_lists_them_in():
    gpus = [Gpu(id=i, slice_index=0) for i in (3, 1, 2, 0, 7, 5, 6, 4)]
    mesh = make_mesh(MeshSpec(dp=2, tp=4), gpus)
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_processes_of_one_nvlink_domain_are_one_node():
    gpus = [Gpu(id=i, slice_index=0, process_index=i) for i in range(8)]
    mesh = make_mesh(MeshSpec(dp=2, tp=4), gpus)
    assert [device.id for device in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("spec", "crossing"),
    [
        (MeshSpec(dp=2, tp=8), {"dp": 2}),
        (MeshSpec(pp=2, dp=2, tp=4), {"pp": 2}),
        (MeshSpec(tp=16), {"tp": 2}),
        (MeshSpec(cp=4, tp=4), {"cp": 2}),
    ],
)
def test_over_two_nodes_only_the_outermost_axis_that_can_crosses_the_network(spec: MeshSpec, crossing: dict[str, int]):
    gpus = [Gpu(id=i, slice_index=i // 8) for i in range(16)]
    devices = make_mesh(spec, gpus).devices
    nodes = np.vectorize(lambda device: device.slice_index)(devices)
    met = {axis: int(np.ptp(nodes, axis=index).max()) + 1 for index, axis in enumerate(AXES)}
    assert {axis: count for axis, count in met.items() if count > 1} == crossing


def test_an_axis_that_nodes_do_not_divide_stays_inside_them():
    # 2 nodes of 12, pp 3: in plain order of ids, the second stage would lie on both nodes.
    gpus = [Gpu(id=i, slice_index=i // 12) for i in range(24)]
    devices = make_mesh(MeshSpec(pp=3, dp=2, tp=4), gpus).devices
    nodes = np.vectorize(lambda device: device.slice_index)(devices)
    assert (nodes == np.arange(2)[None, :, None, None, None]).all(), "dp is the node, on every stage"


def test_nodes_of_unequal_shares_keep_the_order_of_the_machine():
    gpus = [Gpu(id=i, slice_index=i // 8) for i in range(12)]
    mesh = make_mesh(MeshSpec(dp=3, tp=4), gpus)
    assert [device.id for device in mesh.devices.flat] == list(range(12))


@pytest.mark.parametrize("spec", [MeshSpec(dp=16, tp=4), MeshSpec(dp=4, cp=4, tp=4), MeshSpec(pp=2, dp=8, tp=4)])
def test_on_a_torus_a_tp_group_of_four_is_a_ring(spec: MeshSpec):
    devices = make_mesh(spec, torus(4, 4, 4)).devices
    assert len(set(devices.flat)) == 64
    for group in devices.reshape(-1, 4):
        spread = np.ptp([device.coords for device in group], axis=0)
        assert sorted(spread) == [0, 0, 3], "the four chips of one line of the torus"


def test_an_axis_may_take_part_of_a_torus_dimension():
    devices = make_mesh(MeshSpec(dp=8, tp=8), torus(4, 4, 4)).devices
    assert len(set(devices.flat)) == 64
    for group in devices.reshape(-1, 8):
        assert sorted(np.ptp([device.coords for device in group], axis=0) + 1) == [1, 2, 4]


def test_over_two_slices_the_outermost_axis_crosses():
    chips = [SlicedTpu(**vars(chip), slice_index=index) for index in range(2) for chip in torus(2, 2, 1)]
    devices = make_mesh(MeshSpec(dp=2, tp=4), chips).devices
    assert [{chip.slice_index for chip in group} for group in devices.reshape(2, 4)] == [{0}, {1}]


def test_chips_with_holes_between_them_keep_the_order_of_the_machine():
    chips = torus(2, 2, 2)[:3]
    assert list(make_mesh(MeshSpec(tp=3), chips).devices.flat) == chips


@pytest.mark.parametrize("platform", [3, b"cpu", ["cpu"]])
def test_a_platform_that_is_no_name_is_refused(platform: object):
    with pytest.raises(MeshError, match=r'^platform=.*: use "cpu", "gpu", "tpu"'):
        ensure_devices(MeshSpec(), platform)
