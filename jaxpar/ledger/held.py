"""How many tokens of its requests each rank has cached, as a session that prefilled them would have them."""

from __future__ import annotations

from jaxpar.engine.prefill import cuts_of
from jaxpar.engine.sizes import stored_by_rank, table_width
from jaxpar.plan import Phase, Plan


class Held:
    """What the fullest rank of cp has of each of `batch` requests of `seq` tokens.

    In decode the last of them is the new one of the step, and the others were prefilled.
    """

    def __init__(self, phase: Phase, batch: int, seq: int, plan: Plan) -> None:
        """Find where prefill cuts the requests."""
        self._prompt, self._plan = seq - (phase == "decode"), plan
        self._cuts = cuts_of([self._prompt] * batch, plan)

    def each(self, stored: int) -> list[int]:
        """Tokens that it has of the first `stored` of each request."""
        most = {cuts: int(stored_by_rank(self._prompt, stored, self._plan, cuts).max()) for cuts in set(self._cuts)}
        return [most[cuts] for cuts in self._cuts]

    def keys(self, stored: int) -> int:
        """Positions that the page tables of a step list which leaves `stored` tokens of each request cached."""
        return table_width(max(self.each(stored)), self._plan) * self._plan.page_size
