"""Tables of what a search found: the best plans, where one's time and memory go, its limits, and what was assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from rich.table import Table

from jaxpar.plan import Plan
from jaxpar.planner.assumptions import Assumptions
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.evaluate import Question
from jaxpar.planner.limits import Limit
from jaxpar.planner.rates import TYPICAL, efficiency_of, framework_of, rates_of
from jaxpar.planner.search import Found
from jaxpar.planner.timing import StepTime
from jaxpar.planner.verdict import meshes_of
from jaxpar.tables import counted, human_bytes, table

_SHOWN = 1e-3  # of a phase's time: parts that take less are left out
_IN_MESH = ("mesh", "devices_per_node", "max_num_seqs", "dtype", "links", "page_size")


def heading(found: Found, model: str) -> str:
    """What was asked, and how far the search went."""
    asked = found.question
    cluster, workload = asked.cluster, asked.workload
    wanted = [asked.objective]
    if workload.concurrency is not None:
        wanted.append(f"{counted(workload.concurrency, 'request')} at once")
    for name, target in (("TTFT", asked.targets.ttft), ("TPOT", asked.targets.tpot)):
        if target is not None:
            wanted.append(f"{name} <= {1e3 * target:g} ms")
    prefix = f" ({workload.prefix} cached)" if workload.prefix else ""
    return (
        f"{model} on {cluster.name}: {cluster.devices} {cluster.device.kind} of "
        f"{human_bytes(cluster.device.memory_bytes)}, {cluster.devices_per_node} a node; "
        f"{workload.input} tokens in{prefix}, {workload.output} out; {', '.join(wanted)}\n"
        f"{found.looked_at} of {found.space} meshes and expert axes estimated, and their options: "
        f"{counted(found.steps, 'step')} counted"
    )


def options_of(plan: Plan) -> str:
    """What of a plan is not the default, besides its mesh."""
    words = []
    for field in fields(Plan):
        value = getattr(plan, field.name)
        default = Plan.experts_over if field.name == "experts_over" else field.default
        if field.name in _IN_MESH or (value == default and field.name != "chunk"):
            continue
        if field.name == "experts_over":
            words.append(f"experts over {','.join(value)}")
        else:
            words.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(words)


def best_table(best: Sequence[Estimate]) -> Table:
    """The best plans; a deployment of two pools has a row for each."""
    columns = [
        "#", "mesh", "requests", "TTFT ms", "TPOT ms", "tokens/s/device", "/user", "memory", "of it", "largest",
        "bound by", "options",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for number, one in enumerate(best, 1):
        for pool in one.pools:
            first, last = pool is one.pools[0], pool is one.pools[-1]
            role = "" if not one.apart else "decode " if last else "prefill "
            bounds = [longest(one).bound] * first + [one.decode.step.bound] * last
            figures = [
                f"{value:.4g}" if last else ""
                for value in (1e3 * one.ttft, 1e3 * one.tpot, one.tokens_per_device, one.tokens_per_user)
            ]
            memory = pool.memory
            rows.append([
                number if first else "", f"{role}{pool.plan.mesh}", pool.batch, *figures,
                human_bytes(pool.used_bytes), f"{pool.used_bytes / memory.device_bytes:.0%}",
                f"{memory.largest} {human_bytes(memory.items[memory.largest])}", ", ".join(bounds),
                options_of(pool.plan),
            ])  # fmt: skip
    drawn = table("Best plans", columns, rows, left=2)
    drawn.columns[-1].justify, drawn.columns[-1].no_wrap = "left", False
    return drawn


def longest(one: Estimate) -> StepTime:
    """The chunk of prefill that takes longest."""
    return max((step for step, _ in one.prefill.steps), key=lambda step: step.seconds)


def first_token_line(one: Estimate) -> str:
    """The parts of the time to first token."""
    first = one.served.first
    text = f"TTFT {1e3 * first.total:.4g} ms = queue {1e3 * first.queue:.4g} + prefill {1e3 * first.prefill:.4g}"
    text += f" + transfer {1e3 * first.transfer:.4g}"
    if one.prefill.bubble:
        text += f"; of prefill {1e3 * one.prefill.bubble:.4g} are stages that wait"
    if one.apart:
        return f"{text}; the pool that prefills is busy {one.served.prefilling:.0%} of the time"
    between = one.tpot - one.decode.tpot
    return (
        f"{text}\nTPOT {1e3 * one.tpot:.4g} ms = decode {1e3 * one.decode.tpot:.4g} + prefills of others "
        f"{1e3 * between:.4g}"
    )


def time_table(one: Estimate) -> Table:
    """Where the time goes, part by part: of a prompt (all its chunks), and of a decode step."""
    rows: list[list[object]] = []
    for phase, steps in (("prefill", one.prefill.steps), ("decode", ((one.decode.step, one.decode.ticks),))):
        rows += _time_rows(phase, steps)
    columns = ["phase", "part", "ms", "share", "compute", "memory", "kernels", "sent", "hidden", "over", "bound by"]
    return table("Where the time goes, in ms of the slowest rank", columns, rows, left=2)


def _time_rows(phase: str, steps: Iterable[tuple[StepTime, int]]) -> list[list[object]]:
    every = [*steps]
    whole = sum(step.seconds * times for step, times in every)
    names = dict.fromkeys(part.name for step, _ in every for part in step.parts)
    rows: list[list[object]] = []
    for name in names:
        parts = [(part, times) for step, times in every for part in step.parts if part.name == name]
        sums = [
            sum(times * getattr(part, what) for part, times in parts)
            for what in ("seconds", "compute", "memory", "kernels", "sent", "hidden")
        ]
        if sums[0] < _SHOWN * whole:
            continue
        over = dict.fromkeys("+".join(axes) for part, _ in parts for axes, seconds in part.sending if seconds)
        slowest = max(parts, key=lambda item: item[0].seconds)[0]
        rows.append([
            phase, name, f"{1e3 * sums[0]:.4g}", f"{sums[0] / whole:.1%}",
            *(f"{1e3 * value:.4g}" if value else "" for value in sums[1:]), " ".join(over), slowest.bound,
        ])  # fmt: skip
    host = sum(step.overhead * times for step, times in every)
    if host:
        rows.append([phase, "host", f"{1e3 * host:.4g}", f"{host / whole:.1%}", *[""] * 6, "latency"])
    return rows


def roofline_table(one: Estimate) -> Table:
    """Each sublayer of each step: what it computes, reads and sends, and which of them takes longest."""
    columns = [
        "step", "times", "part", "GFLOP", "MB", "compute ms", "memory ms", "kernels ms", "sent ms", "hidden ms",
        "over", "takes ms", "bound by",
    ]  # fmt: skip
    rows: list[list[object]] = []
    steps = [(f"prefill {number}", step, times) for number, (step, times) in enumerate(one.prefill.steps, 1)]
    for name, step, times in [*steps, ("decode", one.decode.step, one.decode.ticks)]:
        for index, part in enumerate(step.parts):
            figures = (part.compute, part.memory, part.kernels, part.sent, part.hidden)
            over = dict.fromkeys("+".join(axes) for axes, seconds in part.sending if seconds)
            rows.append([
                name if not index else "", times if not index else "", part.name,
                f"{part.flops / 1e9:.4g}", f"{part.bytes / 1e6:.4g}",
                *(f"{1e3 * value:.4g}" if value else "" for value in figures),
                " ".join(over), f"{1e3 * part.seconds:.4g}", part.bound,
            ])  # fmt: skip
    return table("The roofline of each sublayer, all layers of a stage together, on the slowest rank", columns, rows, 3)


def runs(one: Estimate, assumed: Assumptions) -> str:
    """What the lines below it do, and what of the estimate they do not."""
    dtypes = {"weights": assumed.weight_dtype, "cache": assumed.kv_dtype, "attention": assumed.attention_dtype}
    others = [f"{what} in {dtype}" for what, dtype in dtypes.items() if dtype not in (None, one.plan.dtype)]
    lacks = [f"all of it in {one.plan.dtype}, without the {', '.join(others)} of the estimate"] if others else []
    if one.apart:
        lacks.append("jaxpar has no server that passes caches from one pool to the other")
    said = "Each pool runs its plan with" if one.apart else "It runs with"
    return f"{said} ({'; '.join(lacks)})" if lacks else said


def memory_table(one: Estimate) -> Table:
    """What lies on the fullest device of each pool."""
    names = list(dict.fromkeys(name for pool in one.pools for name in pool.memory.items))
    titles = [meshes_of(one)] if not one.apart else [f"prefill {one.pools[0].plan.mesh}", f"decode {one.plan.mesh}"]
    rows: list[list[object]] = [
        [name, *(human_bytes(pool.memory.items.get(name, 0)) for pool in one.pools)] for name in names
    ]
    rows.append(["all", *(human_bytes(pool.memory.total) for pool in one.pools)])
    rows.append(["left", *(human_bytes(-pool.memory.over) for pool in one.pools)])
    return table("Memory of the fullest device", ["item", *titles], rows)


def limits_lines(found: Iterable[Limit]) -> list[str]:
    """Why nothing is larger, an axis a line."""
    return [f"{limit.name}={limit.size}, not {limit.larger or 'more'}: {limit.reason}" for limit in found]


def assumptions_table(question: Question) -> Table:
    """Every assumption with what it comes to for this device; each can be set."""
    values = assumed_values(question)
    told = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    rows = [[name, told[name], what] for name, what in question.assumed.names().items()]
    return table("Assumed (--assume name=value)", ["name", "value", "what it is"], rows, left=3)


def assumed_values(question: Question) -> dict[str, object]:
    """What each assumption is, or where it is left to the device or the plan what it comes to."""
    assumed, device, dtype = question.assumed, question.cluster.device, question.config.dtype
    rates = rates_of(device, assumed, dtype)
    of_device: dict[str, object] = {
        "weight_dtype": dtype,
        "kv_dtype": dtype,
        "attention_dtype": dtype,
        "matmul_efficiency": rates.wide / device.peak_bf16_flops,
        "memory_efficiency": rates.memory / device.memory_bandwidth,
        **{name: efficiency_of(name, device, assumed) for name in TYPICAL},
        "kernel_overhead": rates.kernel,
        "step_overhead": rates.step,
        "framework_bytes": framework_of(device, assumed),
        "transfer_bandwidth": device.internode_bandwidth,
    }
    found: dict[str, object] = {}
    for name in assumed.names():
        value = getattr(assumed, name)
        if name == "imbalance" and question.loads is not None:
            value = "as measured"
        found[name] = of_device.get(name) if value is None else value
    return found
