"""Every registered strategy compiled for accelerators at one small shape: which compile for what, and what they send.

Models are bundled cards, cut to one layer of each kind. A strategy runs on the first plan of `applicable.py` that
chooses it; those of training in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
from rich.table import Table

from jaxpar.aot.compile import compile_step
from jaxpar.aot.targets import Target
from jaxpar.aot.training import lowered_step, training_programs
from jaxpar.applicable import every_way
from jaxpar.assets import model_dir
from jaxpar.checkpoint import read_config
from jaxpar.checkpoint.config import ModelConfig
from jaxpar.errors import JaxparError
from jaxpar.ledger.hlo import parse_collectives
from jaxpar.ledger.steps import make_steps
from jaxpar.mesh import MeshSpec
from jaxpar.plan import PHASES, Plan
from jaxpar.registry import STRATEGIES, chosen
from jaxpar.strategies import Step, Strategy
from jaxpar.tables import counted, markdown, table

DEVICES, BATCH, CONTEXT = 8, 8, 256
"""The shape: devices of a mesh, requests, and tokens of each."""

LENGTH = 128
"""Tokens of a sequence in a training step."""

CARDS = {"llama-3.1-8b": (False,), "qwen3-235b-a22b": (True,), "deepseek-v3": (False, True)}
"""The cards, and whether each layer that is left of them has experts."""

TRAINING = ("loss", "balance", "gradient")
"""Sublayers that a training step alone has."""

Work = Literal["prefill", "decode", "train"]
Scopes = set[tuple[str, str]]


@dataclass(frozen=True)
class Case:
    """A strategy and the program that shows it, `plan` None where no plan does; `problem` then says why."""

    strategy: Strategy
    model: str
    work: Work
    plan: Plan | None
    problem: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a compiler said to a strategy: the `calls` of its collectives in the program, or why there is none."""

    compiles: bool
    calls: int = 0
    asynchronous: int = 0
    reason: str = ""

    def __str__(self) -> str:
        """In a cell of a table."""
        if not self.compiles:
            return f"no: {self.reason}"
        beside = f", {self.asynchronous} asynchronous" if self.asynchronous else ""
        return f"yes, {counted(self.calls, 'call')}{beside}" if self.calls else "yes"


@dataclass(frozen=True)
class Row:
    """A strategy, the program, and its outcome for each target."""

    case: Case
    outcomes: dict[str, Outcome]

    @property
    def proved(self) -> bool:
        """Whether it compiles for every target; one that no plan shows has compiled for none."""
        return bool(self.outcomes) and all(one.compiles for one in self.outcomes.values())

    @property
    def cells(self) -> list[str]:
        """The columns of a table."""
        case = self.case
        found = [str(one) for one in self.outcomes.values()]
        mesh = case.problem if case.plan is None else str(case.plan.mesh)
        return [case.strategy.sublayer, case.strategy.name, case.model, mesh, case.work, *found]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        case = self.case
        return {
            "sublayer": case.strategy.sublayer,
            "strategy": case.strategy.name,
            "model": case.model,
            "mesh": case.plan and case.plan.mesh.sizes,
            "work": case.work,
            "problem": case.problem or None,
            "targets": {name: asdict(one) for name, one in self.outcomes.items()},
        }


def every_case() -> list[Case]:
    """All registered strategies, in the order of the registry."""
    models = {name: cut_card(name, layers) for name, layers in CARDS.items()}
    plans = [
        (name, way.plan)
        for name, config in models.items()
        for way in every_way(config, DEVICES, {"dtype": "bfloat16"})
        if way.plan is not None
    ]
    shown: dict[tuple[str, str], Case] = {}
    for name, plan in plans:
        steps = {phase: make_steps(models[name], plan, phase, BATCH, CONTEXT)[0].batches[0] for phase in PHASES}
        ways = [
            (len({row.collective for row in strategy.sent(step)}), Case(strategy, name, phase, plan))
            for phase, step in steps.items()
            for strategy in chosen(step).values()
        ]
        # Of both phases that which shows more of it: a sum by levels has one level where it stays in a node.
        for _, way in sorted(ways, key=lambda kinds_and_way: kinds_and_way[0], reverse=True):
            shown.setdefault((way.strategy.sublayer, way.strategy.name), way)
    training = Plan(MeshSpec(dp=2, ep=2, tp=2))
    cases = []
    for strategy in STRATEGIES:
        case = shown.get((strategy.sublayer, strategy.name))
        if strategy.sublayer in TRAINING:
            case = Case(strategy, "qwen3-235b-a22b", "train", training)
        cases.append(case or Case(strategy, "-", "prefill", None, "no plan of applicable.py chooses it"))
    return cases


def cut_card(name: str, layers: Sequence[bool]) -> ModelConfig:
    """A bundled model with the first of its layers that follow one another and have experts where `layers` says so."""
    config, count = read_config(model_dir(name)), len(layers)
    experts = config.moe.layers if config.moe else (False,) * config.num_hidden_layers
    first = next(at for at in range(len(experts)) if experts[at : at + count] == tuple(layers))
    return config.of_layers(slice(first, first + count))


def compile_every(targets: Sequence[Target], progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Compile each program once for each target."""
    cases, programs = every_case(), dict[tuple[Any, ...], Callable[[Scopes], Outcome]]()
    rows = []
    for number, case in enumerate(cases, 1):
        outcomes = {}
        for target in targets if case.plan is not None else ():
            progress(f"{number} of {len(cases)}: {case.strategy.sublayer}={case.strategy.name} for {target}")
            key = (case.model, case.work, case.plan, target)
            if key not in programs:
                programs[key] = _compile(case, target)
            outcomes[str(target)] = programs[key](_scopes(case))
        rows.append(Row(case, outcomes))
    return rows


def _compile(case: Case, target: Target) -> Callable[[Scopes], Outcome]:
    """What counts the calls of a strategy, by its scopes, in the compiled program of a case."""
    assert case.plan is not None
    config = cut_card(case.model, CARDS[case.model])
    try:
        if case.work == "train":
            train = training_programs(config, case.plan, target, BATCH, LENGTH)
            text = lowered_step(train).compile().as_text() or ""
            calls = [
                (row.sublayer, row.strategy, row.calls, row.asynchronous)
                for row in parse_collectives(text, case.plan.mesh.sizes)
                if row.axes != ()
            ]
        else:
            found = compile_step(config, case.plan, target, case.work, BATCH, CONTEXT)
            calls = [(row.sublayer, row.strategy, row.calls, row.asynchronous) for row in found.sent]
    except (JaxparError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return lambda scopes: Outcome(False, reason=reason)

    def outcome(scopes: Scopes) -> Outcome:
        mine = [(count, beside) for sublayer, name, count, beside in calls if (sublayer, name) in scopes]
        return Outcome(True, sum(count for count, _ in mine), sum(count for count, beside in mine if beside))

    return outcome


def _scopes(case: Case) -> Scopes:
    assert case.plan is not None
    config = cut_card(case.model, CARDS[case.model])
    if case.work == "train":
        step = Step(config, case.plan, "prefill", BATCH, LENGTH, LENGTH, differentiated=True)
    else:
        step = make_steps(config, case.plan, case.work, BATCH, CONTEXT)[0].batches[0]
    return {(row.sublayer, row.strategy) for row in case.strategy.sent(step)}


def _columns(targets: Sequence[Target]) -> Iterator[str]:
    yield from ("sublayer", "strategy", "model", "mesh", "step", *map(str, targets))


def render_every(rows: Sequence[Row], targets: Sequence[Target]) -> Table:
    """The table for people."""
    columns = [*_columns(targets)]
    return table("", columns, [row.cells for row in rows], left=len(columns))


def rows_markdown(rows: Sequence[Row], targets: Sequence[Target]) -> str:
    """The table as Markdown."""
    columns, cells = [*_columns(targets)], [row.cells for row in rows]
    return markdown(columns, [[one[0], f"`{one[1]}`", *one[2:]] for one in cells], left=len(columns))
