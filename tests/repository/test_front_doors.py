"""Tests enter packages through their front doors, but for a list of tests of algorithms.

What is not listed survives the renaming of any internal module.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tools.workspace import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {
    "lowerdeck.exir_compat.hugging_face",
    "lowerdeck.lowered_module.testing",
    "lowerdeck.xnnpack.quantizer",
}
# By reason: the test files, without ``packages/``, ``tests/`` and suffix.
BEHIND = {
    "formats of bytes and text": (
        "demo-backends/test_text_format "
        "openvino/test_partition openvino/test_payload "
        "serializer/test_read "
        "serializer/test_field_check "
        "serializer/test_writer serializer/test_schema serializer/test_stream "
        "xnnpack/test_runtime"
    ),
    "counted steps, bytes or lookups": (
        "decompose/test_sizes inspect/inspect_steps inspect/test_steps "
        "xnnpack/test_partition xnnpack/test_rounding xnnpack/test_weights "
        "language-models/test_stored"
    ),
    "order, placement and lifetimes": (
        "emitter/test_placement graph-fuser/fuser_graphs graph-fuser/test_effects "
        "graph-fuser/test_schedule interop/test_runner_memory_plans runner/test_flow "
        "inspect/test_report_lifetimes lowered-module/test_signature"
    ),
    "rules, one by one, beside torch": (
        "decompose/test_devices emitter/test_constants emitter/test_decompositions "
        "emitter/test_defaults emitter/test_passes lowered-module/test_foldable "
        "lowered-module/test_quantizing lowered-module/test_views "
        "runner/test_kernels runner/test_precision "
        "torch-base/test_copies xnnpack/test_quantizer xnnpack/test_patterns "
        "interop/test_xnnpack_quantizer"
    ),
    "parsers of hostile text": "runner/hostile_kernels runner/test_structure",
    "pages and commands without a public function": (
        "language-models/test_changes language-models/test_generating "
        "inspect/test_answers lowered-module/test_commands runner/test_commands "
        "inspect/test_command_line inspect/test_doctor inspect/test_payload_contents "
        "inspect/test_quiet inspect/test_report inspect/test_report_trace "
        "interop/test_language_models interop/test_serializer_payloads"
    ),
}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_internal(module: str) -> bool:
    parts = module.split(".")
    if parts[0] != "lowerdeck" or len(parts) < 3 or module in PUBLIC:
        return False
    folder = ROOT / "packages" / parts[1].replace("_", "-") / "src"
    path = folder.joinpath(*parts)
    return path.with_suffix(".py").exists() or path.is_dir()


def test_only_listed_tests_import_internal_modules() -> None:
    files = [*ROOT.glob("packages/*/tests/*.py"), *ROOT.glob("tests/interop/*.py")]
    found = set()
    for path in files:
        suite = path.parent.name if path.parent.name == "interop" else path.parts[-3]
        # Each use of torch's private names has its test there.
        if path.stem != "test_torch_private" and any(map(_is_internal, _imported(path))):
            found.add(f"{suite}/{path.stem}")
    listed = {name for names in BEHIND.values() for name in names.split()}
    assert sorted(found - listed) == [], (
        "import the package itself, or list the file with a reason"
    )
    assert sorted(listed - found) == [], (
        "they import no internal module any more: take them off the list"
    )


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "tools"])
def test_what_suites_outside_ci_import_is_there(folder: str) -> None:
    missing = []
    for path in sorted(ROOT.joinpath(folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lowerdeck."):
                module = importlib.import_module(str(node.module))
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                missing += [f"{path.name}: {node.module}.{name}" for name in names]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_offered_name_is_there_and_no_other(package: str) -> None:
    door = importlib.import_module(f"lowerdeck.{package.replace('-', '_')}")
    assert all(hasattr(door, name) for name in door.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = door.no_such_name


def test_runtime_halves_are_found_where_they_are_registered() -> None:
    assert all(callable(one.load()) for one in entry_points(group="lowerdeck.runtimes"))


KNOWN = """
import sys
from lowerdeck.lowered_module import BackendDetails
exec(sys.argv[2])
known = [BackendDetails]
for cls in known:
    known += cls.__subclasses__()
mine = [cls for cls in known if cls.__module__.startswith(sys.argv[1])]
print(*sorted(cls.__name__ for cls in mine if not cls.__abstractmethods__))
"""


@pytest.mark.parametrize(
    ("package", "name", "makes"),
    [
        ("demo_backends", "BlobError", False),
        ("demo_backends", "StateDemoPartitioner", True),
        ("xnnpack", "XnnpackRuntime", False),
        ("xnnpack", "XnnpackPartitioner", True),
    ],
)
def test_only_halves_that_compile_make_backends_known(
    package: str, name: str, makes: bool
) -> None:
    door = importlib.import_module(f"lowerdeck.{package}")
    code = f"from {door.__name__} import {name}; {name}()"
    words = [sys.executable, "-W", "ignore", "-c", KNOWN, door.__name__, code]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    backends = {one for one in door.__all__ if "Backend" in one and "Error" not in one}
    assert {*told.split()} == (backends if makes else set())
