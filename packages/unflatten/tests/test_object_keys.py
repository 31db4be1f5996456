"""What code names is told apart: by value where it has a hash, else by identity."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch
from torch.fx import Graph

from lowerdeck.unflatten.code.code import Itself, Source, write_source


def test_an_object_that_cannot_be_hashed_is_a_key_that_is_equal_to_itself_alone() -> None:
    class Unhashable(list[int]):
        """Lists of equal items are equal, and have no hash."""

    one, equal = Unhashable([1]), Unhashable([1])
    assert one == equal
    assert Itself(one) == Itself(one)
    assert hash(Itself(one)) == hash(Itself(one))
    assert Itself(one) != Itself(equal)
    assert Itself(one) != one
    assert len({Itself(one), Itself(one), Itself(equal)}) == 2


def test_a_key_keeps_its_object_alive_so_that_no_other_takes_its_id() -> None:
    class Held:
        __hash__ = None  # type: ignore[assignment]

    keys = {Itself(Held()) for _ in range(1000)}
    assert len(keys) == 1000
    held = Held()
    alive, key = weakref.ref(held), Itself(held)
    del held
    assert alive() is key.value


def test_code_that_names_equal_objects_without_a_hash_is_not_shared() -> None:
    def source(value: Any) -> Source:
        graph = Graph()
        graph.output(graph.call_function(operator.getitem, (graph.placeholder("x"), value)))
        return write_source(graph)

    one, equal = torch.device("cpu"), torch.device("cpu")
    assert source(one).key == source(equal).key
    first, second = bytearray(b"a"), bytearray(b"a")
    assert source(first).key == source(first).key
    assert source(first).key != source(second).key
