"""What goes in 0.2 works until then, and says so."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

from lowerdeck.emitter import OFFICIAL_KERNELS, KernelTable, Lifetime
from lowerdeck.emitter.ir.values import Role, Storage
from lowerdeck.serializer import runtime_kernels


def test_a_table_tells_who_demands_contiguous_tensors_and_says_where_to_ask() -> None:
    with pytest.warns(DeprecationWarning, match="runtime_kernels.. for kernels") as warned:
        demanding = OFFICIAL_KERNELS.contiguous_only
    assert warned[0].filename == __file__
    kernels = runtime_kernels().values()
    assert demanding == {kernel.operator for kernel in kernels if "contiguous" in kernel.words}
    assert demanding


def test_tables_made_of_tables_keep_it() -> None:
    none = frozenset[str]()
    table = KernelTable(frozenset({"a::b.out"}), frozenset({"a::b"}), none, none, none, none, none)
    more = table.with_kernels(["c::d.out"])
    assert {"a::b.out", "c::d.out"} == more.names
    copies = (copy.deepcopy(more), pickle.loads(pickle.dumps(more)), replace(more, version="1"))
    for one in (table, more, *copies):
        with pytest.warns(DeprecationWarning, match="goes in lowerdeck-emitter 0.2"):
            assert one.contiguous_only == {"a::b"}
    assert more == table.with_kernels(["c::d.out"]) != table
    assert len({more, table.with_kernels(["c::d.out"])}) == 1


@pytest.mark.parametrize(
    ("first", "last", "meets"), [(0, 1, False), (0, 2, True), (4, 9, True), (5, 6, False)]
)
def test_lifetimes_tell_whether_they_meet(first: int, last: int, meets: bool) -> None:
    one, other = (
        Lifetime(Storage(16, Role.ACTIVATION, "x"), 16, *steps)
        for steps in ((2, 4), (first, last))
    )
    for left, right in ((one, other), (other, one)):
        with pytest.warns(DeprecationWarning, match="compare first and last"):
            assert left.overlaps(right) is meets
