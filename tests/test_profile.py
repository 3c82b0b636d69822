"""Profiles: what the trace of a real program says, what a TPU's or GPU's trace would, and errors."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxpar.errors import JaxparError
from jaxpar.profile import Collective, ProfileSummary, profiled, render, summarize
from jaxpar.profile.programs import Operation, guess, programs
from jaxpar.profile.summary import exposed
from jaxpar.profile.trace import Span

STEPS, HOPS = 3, 4


def _step(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("layer_0"), jax.named_scope("ffn:psum"):
        y = jax.lax.psum(jnp.tanh(x @ w), "tp")

    def hop(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        with jax.named_scope("attention:ring"):
            return jnp.sin(jax.lax.ppermute(carry, "dp", [(0, 1), (1, 0)])), None

    return jax.lax.scan(hop, y, None, length=HOPS)[0]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of STEPS runs of `_step` over dp=2, tp=4."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    step = jax.jit(jax.shard_map(_step, mesh=mesh, in_specs=(P("dp", "tp"), P("tp")), out_specs=P("dp")))
    x = jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(mesh, P("dp", "tp")))
    w = jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(mesh, P("tp")))
    step(x, w).block_until_ready()
    directory = tmp_path_factory.mktemp("profiles") / "not" / "there" / "yet"
    with profiled(directory):
        for _ in range(STEPS):
            step(x, w).block_until_ready()
    return directory


@pytest.fixture(scope="module")
def summary(recorded: Path) -> ProfileSummary:
    return summarize(recorded)


PSUM = Collective("all-reduce", "ffn:psum")
RING = Collective("collective-permute", "attention:ring")


def test_compute_is_told_apart_by_whom_it_runs_for(summary: ProfileSummary) -> None:
    for device in summary.devices:
        assert sum(device.computes.values()) == pytest.approx(device.compute)
        assert device.computes["ffn:psum"] > 0
        assert device.of("ffn") == pytest.approx(device.computes["ffn:psum"] + device.collectives[PSUM])
    assert summary.share("ffn") + summary.share("attention") + summary.mean().idle / summary.mean().wall < 1.0001


def test_every_device_has_a_row(summary: ProfileSummary) -> None:
    assert [time.device for time in summary.devices] == [f"cpu:{i}" for i in range(8)]


def test_collectives_are_named_by_kind_and_strategy_and_counted_as_run(summary: ProfileSummary) -> None:
    for time in summary.devices:
        assert time.calls == {PSUM: STEPS, RING: STEPS * HOPS}
        assert all(seconds > 0 for seconds in time.collectives.values())


def test_times_of_a_device_sum_to_the_wall_time_that_all_devices_share(summary: ProfileSummary) -> None:
    for time in (*summary.devices, summary.mean()):
        assert time.wall == pytest.approx(summary.devices[0].wall, rel=1e-9)
        assert time.compute > 0
        assert time.idle >= 0
        assert time.compute + sum(time.collectives.values()) + time.idle == pytest.approx(time.wall, rel=1e-9)
        assert time.by_kind() == {"all-reduce": time.collectives[PSUM], "collective-permute": time.collectives[RING]}


def test_mean_is_over_all_devices(summary: ProfileSummary) -> None:
    mean = summary.mean()
    assert mean.compute == pytest.approx(sum(time.compute for time in summary.devices) / 8)
    assert mean.collectives[PSUM] == pytest.approx(sum(time.collectives[PSUM] for time in summary.devices) / 8)
    assert mean.calls == {PSUM: STEPS, RING: STEPS * HOPS}


def test_tables_show_strategies_and_devices_and_say_what_a_collective_on_a_cpu_is(summary: ProfileSummary) -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(render(summary))
    assert all(word in text.getvalue() for word in ("ffn:psum", "attention:ring", "idle", "cpu:7", "mostly waiting"))


def test_summary_is_json(summary: ProfileSummary) -> None:
    rows = json.loads(json.dumps(summary.to_json()))
    assert [row["device"] for row in rows["devices"]] == [f"cpu:{i}" for i in range(8)]
    assert {(c["scope"], c["calls"]) for c in rows["mean"]["collectives"]} == {
        ("ffn:psum", STEPS),
        ("attention:ring", STEPS * HOPS),
    }


SPANS = st.lists(
    st.builds(
        lambda begin, length, collective: Span(begin, begin + length, collective, True),
        st.integers(0, 30),
        st.integers(1, 10),
        st.sampled_from([None, PSUM, RING]),
    ),
    max_size=8,
)


def _ticks(spans: list[Span]) -> set[int]:
    return {tick for span in spans for tick in range(int(span.begin), int(span.end))}


@given(SPANS)
def test_every_busy_moment_is_counted_once_and_compute_hides_collectives(spans: list[Span]) -> None:
    spent = exposed(spans)
    computing = [span for span in spans if span.collective is None]
    assert sum(spent.values()) == len(_ticks(spans))
    assert spent.get(None, 0) == len(_ticks(computing))
    for collective in (PSUM, RING):
        alone = _ticks([s for s in spans if s.collective == collective]) - _ticks(
            [s for s in spans if s.collective != collective]
        )
        assert spent.get(collective, 0) >= len(alone)


def test_of_two_collectives_the_first_to_begin_counts() -> None:
    assert exposed([Span(0, 10, PSUM, True), Span(4, 14, RING, True)]) == {PSUM: 10, RING: 4}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-reduce.17", "all-reduce"),
        ("psum_invariant.3", "all-reduce"),
        ("all-reduce-scatter.1", "reduce-scatter"),
        ("ppermute.2", "collective-permute"),
        ("ragged_all_to_all.1", "ragged-all-to-all"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather"),
        ("loop_multiply_fusion.4", None),
    ],
)
def test_without_its_program_an_operation_is_known_by_its_name(name: str, kind: str | None) -> None:
    assert guess(name).collective == kind


# --- what accelerators record, in small ---


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protocol buffer message (here every number and size is below 128 or split in two)."""

    def varint(n: int) -> bytes:
        return bytes([n]) if n < 128 else bytes([n & 127 | 128, n >> 7])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def _instruction(identity: int, name: str, opcode: str, **fields: int | str) -> bytes:
    message = _field(1, name) + _field(2, opcode) + _field(35, identity)
    if "op_name" in fields:
        message += _field(7, _field(2, fields["op_name"]))
    if "operand" in fields:
        message += _field(36, bytes([int(fields["operand"])]))
    if "calls" in fields:
        message += _field(38, bytes([int(fields["calls"])]))
    return message


def _program(name: str) -> bytes:
    """An XSpace that holds a program whose collectives are asynchronous or fused, as a TPU's or GPU's are."""
    called = _instruction(1, "reduce-scatter.1", "reduce-scatter")
    entry = [
        _instruction(2, "async-start.1", "async-start", calls=7, op_name="jit(f)/ffn:ring/reduce_scatter"),
        _instruction(3, "async-done.1", "async-done", operand=2, op_name="jit(f)/ffn:ring/reduce_scatter"),
        _instruction(4, "all-reduce-start.1", "all-reduce-start"),
        _instruction(5, "fusion.1", "fusion", calls=7),
        _instruction(6, "fusion.2", "fusion", calls=9),
        _instruction(7, "while.1", "while"),
    ]
    computations = [
        _field(2, called) + _field(5, 7),
        _field(2, _instruction(8, "add.1", "add")) + _field(5, 9),
        b"".join(_field(2, instruction) for instruction in entry) + _field(5, 11),
    ]
    hlo = _field(1, b"".join(_field(3, computation) for computation in computations))
    metadata = _field(2, name) + _field(5, _field(1, 4) + _field(6, hlo))
    plane = _field(2, "/host:metadata") + _field(4, _field(1, 9) + _field(2, metadata))
    return _field(1, plane)


def test_asynchronous_and_fused_collectives_are_found_in_what_they_call() -> None:
    operations = programs(_program("jit_f(9)"))["jit_f(9)"]
    assert operations["async-start.1"] == Operation("reduce-scatter", "ffn:ring")
    assert operations["async-done.1"] == Operation("reduce-scatter", "ffn:ring", is_done=True)
    assert operations["all-reduce-start.1"] == Operation("all-reduce", "")
    assert operations["fusion.1"] == Operation("reduce-scatter", "")
    assert operations["fusion.2"] == Operation(None, "")
    assert operations["while.1"] == Operation(None, "", is_control_flow=True)


TPU = """
planes { name: "/host:CPU" lines { name: "python" events { metadata_id: 1 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "busy" } } }
planes { name: "/device:TPU:1"
  lines { name: "Steps" events { metadata_id: 1 duration_ps: 90000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 9000000 } }
  lines { name: "XLA Ops"
    events { metadata_id: 2 offset_ps: 0 duration_ps: 1000000 }
    events { metadata_id: 6 offset_ps: 0 duration_ps: 8000000 }
    events { metadata_id: 3 offset_ps: 1000000 duration_ps: 4000000 }
    events { metadata_id: 4 offset_ps: 5000000 duration_ps: 2000000 }
    events { metadata_id: 5 offset_ps: 8000000 duration_ps: 2000000 } }
  event_metadata { key: 1 value { id: 1 name: "jit_f(9)" } }
  event_metadata { key: 2 value { id: 2 name: "%async-start.1 = (f32[8]) async-start(%p), calls=%c" } }
  event_metadata { key: 3 value { id: 3 name: "%fusion.2 = f32[8] fusion(%all-reduce.9)" } }
  event_metadata { key: 4 value { id: 4 name: "%async-done.1 = f32[8] async-done(%async-start.1)" } }
  event_metadata { key: 5 value { id: 5 name: "%all-gather.5 = f32[8] all-gather(%p)" } }
  event_metadata { key: 6 value { id: 6 name: "%while.1 = f32[8] while(%p)" } } }
"""
GPU = """
planes { name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 stats { metadata_id: 1 str_value: "fusion.2" }
      stats { metadata_id: 2 str_value: "jit_f" } stats { metadata_id: 3 uint64_value: 9 } } }
  lines { name: "Stream #20(Compute)"
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "all-reduce-start.1" }
      stats { metadata_id: 2 str_value: "jit_f" } stats { metadata_id: 3 uint64_value: 9 } } }
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce_Sum_f32" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "program_id" } } }
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    """Write a trace that is given as text, with a program in it, the way the profiler lays it out."""

    def write(text: str) -> Path:
        path = tmp_path / "plugins" / "profile" / "2026_01_01_00_00_00" / "host.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text) + _program("jit_f(9)"))
        return tmp_path

    return write


def test_a_tpu_is_its_own_plane_and_the_host_is_not_a_device(written: Callable[[str], Path]) -> None:
    (time,) = summarize(written(TPU)).devices
    scattered, gathered = Collective("reduce-scatter", "ffn:ring"), Collective("all-gather", "")
    assert time.device == "tpu:1"
    assert (time.wall, time.compute) == (pytest.approx(10e-6), pytest.approx(4e-6))
    assert time.collectives == {scattered: pytest.approx(3e-6), gathered: pytest.approx(2e-6)}
    assert time.calls == {scattered: 1, gathered: 1}
    assert time.idle == pytest.approx(1e-6)


def test_on_a_gpu_a_collective_costs_what_no_kernel_hides(written: Callable[[str], Path]) -> None:
    (time,) = summarize(written(GPU)).devices
    assert time.device == "gpu:0"
    assert time.compute == pytest.approx(4e-6)
    assert time.collectives == {Collective("all-reduce", ""): pytest.approx(2e-6)}


# --- errors ---


def test_no_directory_means_no_profile() -> None:
    with profiled(None), profiled(None):
        pass


def _is_one_line_naming(error: JaxparError, path: Path) -> bool:
    return str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("below", [".", "profiles"])
def test_a_directory_that_is_a_file_is_refused_before_the_work(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(JaxparError) as error, profiled(file / below):
        pytest.fail("the work was done")
    assert _is_one_line_naming(error.value, file / below)


def test_a_directory_that_cannot_be_written_is_refused_before_the_work() -> None:
    directory = Path("/proc/jaxpar")
    with pytest.raises(JaxparError) as error, profiled(directory):
        pytest.fail("the work was done")
    assert _is_one_line_naming(error.value, directory)


def test_an_exception_ends_the_profile_and_leaves_the_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profiled(tmp_path):
        jnp.ones(3).block_until_ready()
        raise ZeroDivisionError
    assert [time.device for time in summarize(tmp_path).devices] == ["cpu:0"]
    with profiled(tmp_path):
        pass


def test_a_second_profile_at_the_same_time_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with profiled(tmp_path / "first"):
        with pytest.raises(JaxparError, match="already been started"), profiled(tmp_path / "second"):
            pytest.fail("the work was done")
        jnp.ones(3).block_until_ready()
    assert summarize(tmp_path / "first").devices


def test_a_directory_without_a_trace_has_no_summary(tmp_path: Path) -> None:
    with pytest.raises(JaxparError, match="no trace") as error:
        summarize(tmp_path)
    assert _is_one_line_naming(error.value, tmp_path)


def test_a_trace_in_which_nothing_ran_has_no_summary(tmp_path: Path) -> None:
    with profiled(tmp_path):
        pass
    with pytest.raises(JaxparError, match="no device ran anything"):
        summarize(tmp_path)


def test_a_truncated_trace_is_an_error_that_names_the_file(recorded: Path, written: Callable[[str], Path]) -> None:
    directory = written("")
    (path,) = directory.glob("**/*.xplane.pb")
    (whole,) = recorded.glob("**/*.xplane.pb")
    path.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(JaxparError, match="not a trace") as error:
        summarize(directory)
    assert _is_one_line_naming(error.value, path)
