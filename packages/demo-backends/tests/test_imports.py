"""Which backends importing a part of this package registers, and which names it offers."""

import subprocess
import sys
from importlib.metadata import entry_points

import lowerdeck.demo_backends

KNOWN = """
from lowerdeck.lowered_module import BackendDetails
{}
known = [BackendDetails]
for cls in known:
    known += cls.__subclasses__()
mine = [cls for cls in known if "demo_backends" in cls.__module__]
print(sorted(cls.__name__ for cls in mine if not cls.__abstractmethods__))
"""


def known_after(code: str) -> str:
    words = [sys.executable, "-W", "ignore", "-c", KNOWN.format(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_a_half_that_compiles_makes_all_backends_known() -> None:
    assert known_after("import lowerdeck.demo_backends") == "[]"
    found = known_after("from lowerdeck.demo_backends import StateDemoPartitioner")
    offered = [name for name in lowerdeck.demo_backends.__all__ if "Backend" in name]
    assert found == str(sorted(name for name in offered if "Error" not in name))


def test_runtime_halves_are_found_where_they_are_registered() -> None:
    for entry in entry_points(group="lowerdeck.runtimes"):
        assert callable(entry.load())
