"""Reading holds the garbage collector back and leaves it as it was, whoever ends first."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from lowerdeck.serializer.collector import collector_held


@pytest.fixture(params=[True, False])
def collector(request: pytest.FixtureRequest) -> Iterator[bool]:
    was_on = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was_on else gc.disable)()


def test_the_last_holder_leaves_it_as_the_first_found_it(collector: bool) -> None:
    inside, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with collector_held():
            inside.set()
            let_go.wait(10)

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(10)
    with pytest.raises(RuntimeError, match="stop"), collector_held():  # noqa: PT012
        let_go.set()
        other.join()
        assert not gc.isenabled()
        with collector_held():
            pass
        assert not gc.isenabled()
        raise RuntimeError("stop")
    assert gc.isenabled() is collector
