"""What importing a part of this package makes known to others."""

import subprocess
import sys
from importlib import metadata

import lowerdeck.serializer
import lowerdeck.xnnpack

KNOWN = """
from importlib.metadata import entry_points
from lowerdeck.lowered_module import BackendDetails
{}
print(sorted(cls.__name__ for cls in BackendDetails.__subclasses__()))
"""


def known_after(code: str) -> str:
    words = [sys.executable, "-W", "ignore", "-c", KNOWN.format(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_the_runtime_half_makes_no_backend_known() -> None:
    entry = "next(iter(entry_points(group='lowerdeck.runtimes', name='XnnpackBackend')))"
    code = f"{entry}.load()(); from lowerdeck.xnnpack import XnnpackRuntime"
    assert "XnnpackBackend" not in known_after(code)


def test_the_half_that_compiles_makes_the_backend_known() -> None:
    assert "'XnnpackBackend'" in known_after("from lowerdeck.xnnpack import XnnpackPartitioner")


def test_a_cache_keeps_the_results_of_releases_apart() -> None:
    assert lowerdeck.xnnpack.XnnpackBackend.version == metadata.version("lowerdeck-xnnpack")
