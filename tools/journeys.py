"""Which modules a program passes through: ``python -m tools.journeys [JOURNEY ...]``.

One small model with state takes the four ways that ``docs/architecture.md`` tells: to a file, to
submodules, from a file to numbers, and back to modules. Each module is listed once, where it is
entered first, with the function that was called, how many calls came from other modules, and how
many modules these were; short modules that only answer a question are named in one line at the
end. A test holds that the page tells the same.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lowerdeck.emitter import emit
from lowerdeck.graph_fuser import fuse_partitions, propose_partitions
from lowerdeck.lowered_module import to_backend
from lowerdeck.runner import load
from lowerdeck.unflatten import unflatten
from lowerdeck.xnnpack import XnnpackPartitioner

ROOT = Path(__file__).resolve().parents[1]
_NAMESPACE = "/src/lowerdeck/"
# Each package has one of each, and enters it from everywhere, or hands on what it imports late.
_EVERYWHERE = {"errors", "_torch_private", "__init__"}
# What is shorter and needs no other module answers a question; it is no stage of a journey.
_SMALL = 60


class Counting(torch.nn.Module):
    """Two linear layers, whose result is multiplied by how often they were called."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count this call, then compute."""
        self.calls.add_(1)
        result: torch.Tensor = self.second(torch.relu(self.first(x))) * self.calls
        return result


INPUTS = (torch.ones(2, 8),)


def _exported() -> torch.export.ExportedProgram:
    return torch.export.export(Counting().eval(), INPUTS)


def _to_file(path: Path) -> Callable[[], object]:
    program = _exported()
    return lambda: emit(to_backend(program, XnnpackPartitioner())).save(path)


def _to_submodules(path: Path) -> Callable[[], object]:
    del path
    graph_module = _exported().graph_module

    def journey() -> object:
        proposal = propose_partitions(graph_module, lambda node: "add_" not in node.name)
        return fuse_partitions(graph_module, proposal.named())

    return journey


def _to_numbers(path: Path) -> Callable[[], object]:
    _to_file(path)()
    return lambda: load(path).run("forward", *INPUTS)


def _to_modules(path: Path) -> Callable[[], object]:
    del path
    program = _exported()
    return lambda: unflatten(program)(*INPUTS)


JOURNEYS = {
    "file": _to_file,
    "submodules": _to_submodules,
    "numbers": _to_numbers,
    "modules": _to_modules,
}


@dataclass
class Visit:
    """One module on a journey."""

    module: str
    function: str  # what was called first
    calls: int = 0  # that came from other modules
    callers: set[str] = field(default_factory=set)


def is_stage(module: str) -> bool:
    """Tell modules that a journey passes through from those that only answer a question.

    Args:
        module: A module such as ``emitter/passes/pipeline.py``.
    """
    package, _, rest = module.partition("/")
    source = ROOT / "packages" / package.replace("_", "-") / "src/lowerdeck" / package / rest
    if source.stem in _EVERYWHERE:
        return False
    text = source.read_text()
    needed = {
        node.module
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowerdeck.")
    }
    alone = all(str(name).endswith(".errors") for name in needed)
    return not (alone and len(text.splitlines()) <= _SMALL)


def record(journey: Callable[[], object]) -> list[Visit]:
    """Make a journey and list the modules that it entered, in the order of their first entry.

    Args:
        journey: What to run; what runs before, such as export, is not recorded.
    """
    visits: dict[str, Visit] = {}
    stack = ["the caller"]
    importing = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        path = frame.f_code.co_filename
        start = path.find(_NAMESPACE)
        if start < 0:
            return
        # The body of a module runs once a process, whoever imports it first, with what it calls.
        if frame.f_code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
            return
        if importing:
            return
        if event == "return":
            stack.pop()
        elif event == "call":
            module = path[start + len(_NAMESPACE) :]
            if module not in visits:
                visits[module] = Visit(module, frame.f_code.co_name)
            if stack[-1] != module:
                visits[module].calls += 1
                visits[module].callers.add(stack[-1])
            stack.append(module)

    sys.setprofile(profile)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return list(visits.values())


def visits_of(name: str) -> list[Visit]:
    """Make one of ``JOURNEYS``.

    Args:
        name: Its name. What an earlier journey of this process has cached is not entered again;
            of these four none hides a module from another.
    """
    with tempfile.TemporaryDirectory() as folder:
        return record(JOURNEYS[name](Path(folder) / "model.pte"))


def main(names: list[str]) -> None:
    """Print journeys.

    Args:
        names: Which; all, if there are none.
    """
    for name in names or JOURNEYS:
        visits = visits_of(name)
        print(f"# {name}")
        for visit in visits:
            if is_stage(visit.module):
                calls = f"{visit.calls} from {len(visit.callers)}"
                print(f"{visit.module:<48} {visit.function:<24} {calls}")
        print("short:", *(visit.module for visit in visits if not is_stage(visit.module)))


if __name__ == "__main__":
    main(sys.argv[1:])
