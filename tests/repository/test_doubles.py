"""One job has one place: what was done in several before, and functions that are written twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tools.torch_private import sources
from tools.workspace import PACKAGES, ROOT

_PAGE = ROOT / "docs/explanation/measures.md"
_SMALLEST = 12
"""Expressions and statements of a function that says something worth saying once."""

_ALONE = {
    # What an operator's schema says of writes: seven places gave their own answers.
    "is_write": {"torch_base/callees.py"},
    # What a size can be: three packages asked by three routes.
    "bound_sympy": {"torch_base/_torch_private.py"},
    # The collector held back: six copies, not safe under threads. Serializer has no torch.
    "isenabled": {"torch_base/collector.py", "serializer/collector.py"},
    "disable": {"torch_base/collector.py", "serializer/collector.py"},
    # What the numbers in a program mean: emitter and runner had tables that differed. Serializer,
    # which has no torch, has the names.
    "complex32": {"torch_base/dtypes.py", "serializer/report/values.py"},
    "channels_last_3d": {"torch_base/dtypes.py", "emitter/passes/legalize_layouts.py"},
}
"""Attributes that are read in these modules only."""

_TWICE = {
    # Named in the page, with the reason.
    ("graph_fuser/outliner/schedule.py", "serializer/report/lifetimes.py"),
    ("serializer/collector.py", "torch_base/collector.py"),
    ("lowered_module/__init__.py", "serializer/__init__.py"),
    ("openvino/__init__.py", "xnnpack/__init__.py"),
}
"""Pairs of modules that say the same, which ``docs/explanation/measures.md`` explains."""


@cache
def _modules() -> dict[str, ast.Module]:
    """Return the shipped modules by their path below ``lowerdeck``."""
    return {
        str(path).rpartition("/lowerdeck/")[2]: ast.parse(Path(path).read_text())
        for package in PACKAGES
        for path in sources(package)
    }


@pytest.mark.parametrize("name", sorted(_ALONE))
def test_what_was_asked_in_many_places_is_asked_in_one(name):
    readers = {
        path
        for path, tree in _modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == name)
        # getattr(argument.alias_info, "is_write") reads it, too.
        or (isinstance(node, ast.Constant) and node.value == name and path != _door(path))
    }
    assert readers == _ALONE[name], "ask the module that is named here instead"


_NAMES_EXECUTORCH = {
    # What this package does beside it.
    "lowered_module/_executorch.py",
    "exir_compat/_executorch.py",
    # Its runtime, which is loaded; whether that is installed, and which version.
    "serializer/official_runtime.py",
    "serializer/commands/doctor.py",
    "runner/commands/official.py",
    "language_models/official.py",
}
"""Modules that may name one of ExecuTorch's, or ask whether something is of it."""


def test_what_is_known_of_executorch_is_known_in_one_module_of_each_package():
    name = re.compile(r"executorch(\.\w+)*\.?")
    named = {
        path
        for path, tree in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        # One word, or one dotted name: a message has more.
        if name.fullmatch(node.value)
    }
    assert named == _NAMES_EXECUTORCH, "ask the package's _executorch.py"


def test_dtypes_and_their_numbers_are_paired_in_one_place():
    """A table of ScalarType and torch's dtypes, either way round, is a copy of torch_base's."""

    def owner(node: ast.expr | None) -> str | None:
        held = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        return node.value.id if held else None

    pairs = {
        path
        for path, tree in _modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if {owner(key), owner(value)} == {"ScalarType", "torch"}
    }
    assert not pairs, "take lowerdeck.torch_base.DTYPES or SCALAR_TYPES"


def _door(path: str) -> str:
    return f"{path.split('/', maxsplit=1)[0]}/__init__.py"


class _SameNames(ast.NodeTransformer):
    """Gives arguments and variables names by their order: what is alike but for those is alike."""

    def __init__(self, own: set[str]) -> None:
        self.own = own
        self.names: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.own:
            node.id = self.names.setdefault(node.id, f"name{len(self.names)}")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.names.setdefault(node.arg, f"name{len(self.names)}")
        node.annotation = None
        return node


def _shape(function: ast.FunctionDef) -> str | None:
    """Return what a function does, whatever its names; None for what is too small to count."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    size = sum(isinstance(part, (ast.expr, ast.stmt)) for one in body for part in ast.walk(one))
    # One short expression is said as fast as a name for it.
    if size < (_SMALLEST if len(body) > 1 else _SMALLEST + 4):
        return None
    own = {part.arg for part in ast.walk(function) if isinstance(part, ast.arg)} | {
        part.id
        for part in ast.walk(function)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }
    bare = ast.FunctionDef("f", function.args, body, [])
    # The copy is of text, since the walk above goes on in the tree.
    text = ast.unparse(ast.fix_missing_locations(ast.Module([bare], [])))
    return ast.dump(_SameNames(own).visit(ast.parse(text)))


def _doubled(modules: dict[str, ast.Module]) -> dict[tuple[str, ...], set[str]]:
    """Return the functions that modules have in common, by the modules."""
    places = defaultdict(set)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (shape := _shape(node)) is not None:
                places[shape].add((path, node.name))
    found = defaultdict(set)
    for same in places.values():
        if len({path for path, _ in same}) > 1:
            found[tuple(sorted({path for path, _ in same}))] |= {name for _, name in same}
    return dict(found)


def test_no_function_is_written_twice():
    found = _doubled(_modules())
    new = {paths: names for paths, names in found.items() if paths not in _TWICE}
    assert not new, "let one package offer it to the other, or say in measures.md why not"
    assert not _TWICE - set(found), "no longer the same: take these out, and out of measures.md"
    text = _PAGE.read_text()
    untold = [path for paths in _TWICE for path in paths if path.split("/")[-1] not in text]
    assert not untold


def test_a_function_under_another_name_is_found():
    one = ast.parse(
        "def kept(rows):\n    '''Of one.'''\n    found = []\n    for row in rows:\n"
        "        if row > 1:\n            found.append(row * 2)\n    return found\n"
    )
    other = ast.parse(
        "class Box:\n    def _big(items: list) -> list:\n        out = []\n"
        "        for x in items:\n"
        "            if x > 1:\n                out.append(x * 2)\n        return out\n"
    )
    assert _doubled({"a/one.py": one, "b/two.py": other}) == {
        ("a/one.py", "b/two.py"): {"kept", "_big"}
    }
    different = ast.parse(ast.unparse(other).replace("x * 2", "x * 3"))
    assert not _doubled({"a/one.py": one, "b/two.py": different})
