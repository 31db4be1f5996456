"""What importing a part of this package makes known to others, and what it still offers."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import lowerdeck.demo_backends
import lowerdeck.xnnpack

OF_0_1_0 = """
    BackendWithCompilerDemo BackendWithDelegateMappingDemo BackendWithSharedWeightsDemo
    BackendWithStateDemo BlobError CompilerDemoPartitioner CompilerDemoRuntime
    CompilerMissingError DelegateInputError DelegateMappingDemoPartitioner
    DelegateMappingDemoRuntime DelegateRunError DemoBackendError ExecutorBackend
    ExecutorPartitioner ExecutorRuntime InductorBackend InductorPartitioner InductorRuntime
    KvCacheAttention NativeCodeError OWN_IDENTIFIERS SharedWeightsDemoPartitioner
    SharedWeightsDemoRuntime StateDemoPartitioner StateDemoRuntime UnsupportedNodeError
    XnnpackBackend XnnpackPartitioner XnnpackRuntime
"""
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


def test_every_offered_name_is_there_and_no_other() -> None:
    for name in lowerdeck.demo_backends.__all__:
        found = getattr(lowerdeck.demo_backends, name)
        assert name.isupper() or found.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = lowerdeck.demo_backends.Nothing


@pytest.mark.filterwarnings("ignore:.* has moved and goes in 0.3:DeprecationWarning")
def test_every_name_of_the_first_release_can_still_be_imported() -> None:
    names = OF_0_1_0.split()
    assert len(names) == 30
    for name in names:
        assert getattr(lowerdeck.demo_backends, name) is not None


@pytest.mark.parametrize("name", ["XnnpackBackend", "XnnpackPartitioner", "XnnpackRuntime"])
def test_what_has_moved_is_the_same_object_and_says_where_it_is_now(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"from lowerdeck.xnnpack import {name}") as told:
        found = getattr(lowerdeck.demo_backends, name)
    assert found is getattr(lowerdeck.xnnpack, name)
    assert [one.filename for one in told] == [__file__]  # the line that has to change


def test_runtime_halves_are_found_where_they_are_registered() -> None:
    for entry in entry_points(group="lowerdeck.runtimes"):
        assert callable(entry.load())
