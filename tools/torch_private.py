"""Where a package touches what is private in torch, and the table of it in the pages.

``python -m tools.torch_private`` writes the table into ``docs/explanation/compatibility.md``. The
tests in ``tests/repository`` require that only each package's ``_torch_private.py`` uses them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import PACKAGES, ROOT, TORCH_FREE, import_name

PAGE = ROOT / "docs/explanation/compatibility.md"
MODULE = "_torch_private.py"
BEGIN, END = "<!-- private names -->", "<!-- end of private names -->"

# Documented by torch, or by Python, despite their names.
_PUBLIC = frozenset(
    {
        "_check",
        "_check_is_size",
        "_asdict",
        "_replace",
        "_fields",
        "_getframe",
        "_value2member_map_",
    }
)

# What torch documents nowhere, despite their names, of what stands behind a symbolic number.
_OF_SYMBOLS = frozenset({"expr", "hint", "pytype"})


def sources(package: str) -> list[Path]:
    """Return the shipped modules of a package."""
    return sorted((ROOT / "packages" / package / "src").rglob("*.py"))


def private_module(package: str) -> Path:
    """Return the path of the one module of a package that touches what is private in torch."""
    return ROOT / f"packages/{package}/src/lowerdeck/{import_name(package)}/{MODULE}"


def own_names(package: str) -> set[str]:
    """Return the names with an underscore that a package defines itself."""
    found: set[str] = set()
    for path in sources(package):
        if path.name == MODULE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.add(name)
    return {name for name in found if _is_private(name)}


def private_uses(path: Path, own: set[str], of_torch: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each use of a private name of torch in a module.

    Args:
        path: The module.
        own: Names of the package itself; they are not torch's.
        of_torch: Attributes that torch's own objects have; they are torch's even if ``own``.
    """
    tree = ast.parse(path.read_text())
    # The names of operators are the vocabulary of programs, not torch's Python.
    not_torchs = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _dotted(node.value).startswith("torch.ops")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # Python's own modules document names with an underscore, as os._exit.
    not_torchs |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in sys.stdlib_module_names
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    if _is_torch(alias.name) and _has_private(alias.name):
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module)):
                for alias in node.names:
                    name = f"{module}.{alias.name}"
                    if _is_torch(name) and _has_private(name):
                        yield node.lineno, name
            case ast.Attribute(attr=attr) if _is_private(attr):
                name = _dotted(node)
                base = name.split(".")[0]
                if name in {f"self.{attr}", f"cls.{attr}"} or base in not_torchs:
                    continue
                if name.startswith("torch.ops."):
                    continue
                if _is_torch(name) or attr in of_torch or attr not in own:
                    yield node.lineno, name
            case ast.Attribute(attr=attr, value=ast.Attribute(attr="node")) if attr in _OF_SYMBOLS:
                yield node.lineno, _dotted(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr" | "delattr"),
                args=[_, ast.Constant(value=str(attr)), *_],
            ) if _is_private(attr) and (attr in of_torch or attr not in own):
                yield node.lineno, attr


def touched_names(package: str) -> list[str]:
    """Return what a package's private module touches: names of torch, then attributes."""
    path = private_module(package)
    if not path.exists():
        return []
    tree = ast.parse(path.read_text())
    made = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    } | {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    found = {name for _, name in private_uses(path, made, set())}
    names = {name if _is_torch(name) else f".{name.rpartition('.')[2]}" for name in found}
    # Of torch.a._b and torch.a._b.c only the longer one tells anything.
    return sorted(
        (name for name in names if not any(other.startswith(f"{name}.") for other in names)),
        key=lambda name: (name.startswith("."), name),
    )


def table() -> str:
    """Return the table of what each package touches, as Markdown."""
    lines = ["| package | private names of torch |", "|---|---|"]
    for package in PACKAGES:
        if package in TORCH_FREE:
            lines.append(f"| {package} | none: it never imports torch |")
        else:
            names = ", ".join(f"`{name}`" for name in touched_names(package))
            lines.append(f"| {package} | {names or 'none'} |")
    return "\n".join(lines)


def page_with_table(text: str) -> str:
    """Return the page with its table written again."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _has_private(dotted: str) -> bool:
    return any(_is_private(part) for part in dotted.split("."))


def _is_torch(dotted: str) -> bool:
    return dotted.split(".", maxsplit=1)[0] == "torch"


def _dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as text; what is no name in it reads as ``?``."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
