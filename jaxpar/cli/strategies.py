"""`jaxpar strategies`: the registry as a table."""

from __future__ import annotations

from jaxpar.cli.options import Json
from jaxpar.cli.output import OUT, print_json, table


def strategies(json: Json = False) -> None:
    """List the strategies with their axes and collectives."""
    from jaxpar.registry import STRATEGIES

    columns = ("name", "sublayer", "axes", "collectives", "needs", "module")
    if json:
        print_json([{column: getattr(strategy, column) for column in columns} for strategy in STRATEGIES])
        return
    rows = [
        (s.name, s.sublayer, ",".join(s.axes) or "-", ",".join(s.collectives) or "-", s.needs, s.module)
        for s in STRATEGIES
    ]
    OUT.print(table("", columns, rows, left=len(columns)))
