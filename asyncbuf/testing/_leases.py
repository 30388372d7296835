"""Rules of samplers that lease items: each is in one draw at a time, and comes back when that is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncbuf.testing._sampler_history import History, Setting

if TYPE_CHECKING:
    from asyncbuf.testing._contract import Contract


def check_leases(setting: Setting, contract: Contract) -> None:
    """Check them, if the sampler turns out to be one of those.

    Raises:
        AssertionError: a rule is broken.
    """
    if "dropped" not in setting.make_sampler().hooks:
        return
    contract.where = "draws until no more are possible"
    found = _Leases(setting, contract).exhausted()
    if found is None:
        return
    for removes in (False, True):
        _Leases(setting, contract).check_replaced(removes=removes)
    contract.where = "draws until no more are possible, all of which are dropped"
    if _Leases(setting._replace(seed=setting.seed + 1), contract).exhausted() == found:
        _Leases(setting, contract).check_order()


class _Leases(History):
    """A table full of items, from which is drawn until no more draws are possible."""

    def exhausted(self) -> list[int] | None:
        """The rows in the order of their draws; None if a row comes twice, or draws have no end."""
        rows: list[int] = []
        if not self._refill(self._setting.capacity):
            return None
        self._draw_all()
        for one in self._open:
            rows += one.draw.indices.tolist()
        is_over = not self.may_draw(self._setting.sizes[0])
        return rows if is_over and len(set(rows)) == len(rows) > 0 else None

    def _draw_all(self) -> None:
        most = len(self._open) + self._setting.capacity
        while len(self._open) < most and self.may_draw(self._setting.sizes[0]):
            self._draw_rows(self._setting.sizes[0])

    def check_replaced(self, *, removes: bool) -> None:
        """A draw that is dropped gives back none of the items that took its rows.

        Args:
            removes: whether its rows are removed before, or overwritten.
        """
        contract, size = self._contract, self._setting.sizes[0]
        contract.where = f"a draw whose rows were {'removed' if removes else 'overwritten'}, and drawn again"
        self._refill(self._setting.capacity)
        self._draw_rows(size)
        if not self._open:
            return
        rows = self._open[0].draw.indices.tolist()
        if removes:
            self._remove_rows(rows)
        if not self._refill(len(rows) if removes else self._setting.capacity):
            return
        self._draw_all()
        if self.may_draw(size):
            return
        self._drop_draw(self._open.pop(0).draw)
        answer = self.may_draw(size)
        rule = "dropped gives back the items of the draw, and none that took their rows since"
        contract.require(not answer, rule, "no draw of items that are in other draws", f"may_draw is {answer}")

    def check_order(self) -> None:
        """Draws that are dropped together, the oldest first, come again in their order."""
        contract = self._contract
        self.exhausted()
        before = [one.draw.indices.tolist() for one in self._open]
        while self._open:
            self._drop_draw(self._open.pop(0).draw)
        self._draw_all()
        after = [row for one in self._open for row in one.draw.indices.tolist()]
        place = {row: number for number, rows in enumerate(before) for row in rows}
        order = [place[row] for row in after if row in place]
        rule = "draws that are dropped together, the oldest first, come again in their order"
        contract.require(order == sorted(order), rule, f"rows in the order of {before}", after)
