"""Holding the garbage collector back leaves it as found, whoever holds it and ends first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from lowerdeck.serializer.collector import collector_held


@pytest.fixture(name="collector", params=[True, False])
def _collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    was_on = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_on else gc.disable)()


def _fail_while_held() -> None:
    with collector_held():
        assert not gc.isenabled()
        raise RuntimeError("stop")


def test_it_is_as_before_after_an_error(collector: bool) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        _fail_while_held()
    assert gc.isenabled() is collector


def test_holders_nest(collector: bool) -> None:
    with collector_held():
        with collector_held():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is collector


def test_a_thread_that_ends_first_does_not_switch_it_on_for_the_other(collector: bool) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with collector_held():
            inside.set()
            let_go.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(10)
    with collector_held():
        let_go.set()
        other.join()
        assert not gc.isenabled()
    assert gc.isenabled() is collector
