"""What importing a part of this package makes known to others."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import lowerdeck.demo_backends

KNOWN = """
import sys
from importlib.metadata import entry_points
from lowerdeck.lowered_module import BackendDetails
{}
known = [cls for cls in BackendDetails.__subclasses__() if "demo_backends" in cls.__module__]
print(sorted(cls.__name__ for cls in known))
"""


def known_after(code: str) -> str:
    words = [sys.executable, "-W", "ignore", "-c", KNOWN.format(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_the_runtime_half_of_xnnpack_makes_no_backend_known() -> None:
    load = "[e] = entry_points(group='lowerdeck.runtimes', name='XnnpackBackend'); e.load()()"
    assert known_after(load) == "[]"
    assert known_after("import lowerdeck.demo_backends") == "[]"


@pytest.mark.parametrize("name", ["XnnpackPartitioner", "XnnpackBackend"])
def test_a_half_that_compiles_makes_all_backends_known(name: str) -> None:
    found = known_after(f"from lowerdeck.demo_backends import {name}")
    assert "XnnpackBackend" in found
    assert "BackendWithStateDemo" in found


def test_every_offered_name_is_there_and_no_other() -> None:
    for name in lowerdeck.demo_backends.__all__:
        found = getattr(lowerdeck.demo_backends, name)
        assert name.isupper() or found.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lowerdeck.demo_backends.Nothing


def test_runtime_halves_are_found_where_they_are_registered() -> None:
    for entry in entry_points(group="lowerdeck.runtimes"):
        assert callable(entry.load())
