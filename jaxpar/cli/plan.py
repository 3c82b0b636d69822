"""`jaxpar plan`: which plan to run on which devices, before any is there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpar.cli.generate_line import generate_line
from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, print_json, progress
from jaxpar.errors import PlanError

if TYPE_CHECKING:
    from jaxpar.planner.check import Checked
    from jaxpar.planner.estimate import Estimate
    from jaxpar.planner.evaluate import Question


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model directory, config.json, GGUF file, or a bundled model's name.")
    ],
    cluster: Annotated[
        str, typer.Option(help="Devices: h200-8x4 (a node x nodes), v5p-4x4x4, a preset or a mesh TOML (mine.toml:64).")
    ],
    input_: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")],
    output: Annotated[int, typer.Option(help="Tokens that are generated for it.")],
    prefix: Annotated[int, typer.Option(help="Tokens of the prompt that are cached already.")] = 0,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once in all; default: as many as are best.")
    ] = None,
    ttft: Annotated[float | None, typer.Option(metavar="MS", help="Most milliseconds to the first token.")] = None,
    tpot: Annotated[float | None, typer.Option(metavar="MS", help="Most milliseconds between tokens.")] = None,
    objective: Annotated[
        str, typer.Option(help="throughput (of each device), latency (of a request) or cost (devices x time a token).")
    ] = "throughput",
    top: Annotated[int, typer.Option(help="Plans to show.")] = 5,
    explain: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN", help='Roofline, memory and TTFT of a plan: its number, or "dp=4,tp=8 chunk=2048".'
        ),
    ] = None,
    assume: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set an assumption; repeat it for several.")
    ] = None,
    moe_stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Loads of experts, as generate --moe-stats --json prints: the imbalance."),
    ] = None,
    check: Annotated[
        int, typer.Option(metavar="N", help="Compile the N best for the cluster's devices, beside what is predicted.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the Pareto front as a PNG.")] = None,
    json: Json = False,
) -> None:
    """Find the best plans for a model on a cluster.

    A config.json is enough, and no device is needed.

    Exit status 1 if no plan meets the targets: what binds, the nearest plan, and by how much it misses.
    """
    if top < 1:
        raise PlanError(f"--top {top}: show 1 plan or more")
    if check < 0:
        raise PlanError(f"--check {check}: compile 1 plan or more, or 0 for none")
    if plot is not None:
        from jaxpar.pictures import check_picture, require_matplotlib

        require_matplotlib(plot)
        check_picture(plot)
    question = _question(
        model, cluster, (input_, output, prefix, concurrency), (ttft, tpot), objective, assume, moe_stats
    )
    if check:
        from jaxpar.planner.check import target_of

        target_of(question.cluster)  # without a compiler there is no use in a search
    answer = _Answer(model, question, top, explain)
    if check:
        answer.compile(check)
    if plot is not None:
        answer.draw(plot)
    if json:
        print_json(answer.document() | ({"png": str(plot)} if plot else {}))
    else:
        answer.show()
        if plot is not None:
            OUT.print(f"\n{plot} shows the front", markup=False)
    raise typer.Exit(0 if answer.found.met else 1)


def _question(
    model: str,
    cluster: str,
    workload: tuple[int, int, int, int | None],
    targets: tuple[float | None, float | None],
    objective: str,
    assume: list[str] | None,
    moe_stats: Path | None,
) -> Question:
    """What is asked; what cannot be is refused before JAX is imported, which takes longer than all of it."""
    from jaxpar.assets import model_dir
    from jaxpar.checkpoint import open_checkpoint
    from jaxpar.planner.assumptions import Assumptions
    from jaxpar.planner.cluster import Cluster
    from jaxpar.planner.fits import refuse_too_large
    from jaxpar.planner.objectives import find_objective
    from jaxpar.planner.workload import Targets, Workload

    find_objective(objective)
    for option, time in zip(("--ttft", "--tpot"), targets, strict=True):
        if time is not None and not 0 < time < float("inf"):
            raise PlanError(f"{option} {time:g}: give milliseconds above 0")
    asked = Workload(*workload)
    limits = Targets(*(None if time is None else time / 1e3 for time in targets))
    devices = Cluster.parse(cluster)
    config = open_checkpoint(model_dir(model)).config
    asked.check(config)
    assumed = Assumptions().set(assume or [])
    refuse_too_large(config, devices, assumed)
    loads = None
    if moe_stats is not None:
        from jaxpar.moe.loads import read_loads

        loads = read_loads(moe_stats)

    from jaxpar.ledger.rounds import loads_of
    from jaxpar.planner.evaluate import Question

    checked = None if loads is None else loads_of(config, loads)
    return Question(config, devices, asked, limits, assumed, objective, checked)


class _Answer:
    """What was found, told as tables or as JSON."""

    def __init__(self, model: str, question: Question, top: int, explain: str | None) -> None:
        """Search, or with a plan that is written out estimate that one.

        Raises:
            PlanError: no such plan.
        """
        from jaxpar.planner.evaluate import Evaluator
        from jaxpar.planner.given import read_plan
        from jaxpar.planner.search import Found, search

        self._model, self._explain = model, explain
        self._evaluator = Evaluator(question)
        self._checked: list[Checked] = []
        written = explain is not None and not explain.strip().isdecimal()
        with progress("Planning") as status:
            if explain is not None and written:
                given = read_plan(explain, question)
                one = self._evaluator.best(given)
                if one is None:
                    raise PlanError(self._evaluator.problems[given])
                self.found = Found(question, (one,), (one,), 1, 1, self._evaluator.steps)
            else:
                self.found = search(self._evaluator, status.say)
        if not self.found.best:
            raise PlanError(next(iter(self._evaluator.problems.values()), f"no plan runs on {question.cluster.name}"))
        shown = self.found.shown
        self._best = shown[:top]
        number = 1 if written or explain is None else int(explain)
        if not 1 <= number <= len(shown):
            raise PlanError(f"--explain {number}: there are {len(shown)} plans, from 1")
        self._chosen = shown[number - 1]

    def draw(self, path: Path) -> None:
        """The front, as a PNG."""
        from jaxpar.planner.pareto import draw
        from jaxpar.planner.search import along_the_front

        asked = self.found.question
        seen = along_the_front(self._evaluator, self.found)
        groups = {
            "one pool": [one for one in seen if one.fits and not one.apart],
            "prefill and decode apart": [one for one in seen if one.fits and one.apart],
        }
        title = f"{self._model} on {asked.cluster.name}, {asked.workload.input} in, {asked.workload.output} out"
        draw(path, title, {name: group for name, group in groups.items() if group}, self._chosen)

    def compile(self, count: int) -> None:
        """Compile the best plans."""
        from jaxpar.planner.check import check, target_of

        question = self.found.question
        with progress("Compiling") as status:
            self._checked = list(check(question, target_of(question.cluster), self.found.shown[:count], status.say))

    def lines(self, one: Estimate) -> list[str]:
        """The `jaxpar generate` line of each pool."""
        output = self.found.question.workload.output
        return [generate_line(self._model, pool.plan, output) for pool in one.pools]

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        from jaxpar.planner.document import estimate_json, found_json
        from jaxpar.planner.limits import limits

        best = [estimate_json(one) | {"generate": self.lines(one)} for one in self._best]
        chosen = estimate_json(self._chosen) | {"generate": self.lines(self._chosen)}
        return found_json(self.found) | {
            "model": self._model,
            "best": best,
            "explained": chosen,
            "checked": [row.to_json() for row in self._checked],
            "limits": [asdict(limit) for limit in limits(self._evaluator, self._chosen)],
        }

    def show(self) -> None:
        """Tables."""
        from jaxpar.planner import render
        from jaxpar.planner.limits import limits
        from jaxpar.planner.verdict import miss_of

        OUT.print(f"{render.heading(self.found, self._model)}\n", markup=False)
        miss = miss_of(self.found)
        if miss is not None:
            OUT.print(f"{miss.text}\n", markup=False)
        OUT.print(render.best_table(self._best))
        if self._checked:
            from jaxpar.planner.check import check_table, target_of

            OUT.print()
            OUT.print(check_table(self._checked, target_of(self.found.question.cluster)))
        which = self.found.shown.index(self._chosen) + 1
        OUT.print(f"\nPlan {which}: {render.first_token_line(self._chosen)}\n", markup=False)
        OUT.print(render.roofline_table(self._chosen) if self._explain else render.time_table(self._chosen))
        OUT.print()
        OUT.print(render.memory_table(self._chosen))
        OUT.print()
        OUT.print("Why it is not larger")
        for line in render.limits_lines(limits(self._evaluator, self._chosen)):
            OUT.print(line, markup=False)
        OUT.print()
        OUT.print(render.assumptions_table(self.found.question))
        OUT.print(f"\n{render.runs(self._chosen, self.found.question.assumed)}\n", markup=False)
        for line in self.lines(self._chosen):
            OUT.print(f"  {line}", markup=False)
