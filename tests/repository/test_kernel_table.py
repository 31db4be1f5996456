"""What kernels the runtime has stands in one table."""

from __future__ import annotations

import ast
from pathlib import Path

from lowerdeck.serializer import runtime_kernels

ROOT = Path(__file__).resolve().parents[2]
# The table; then implementations and laws by kernel, which say more than its name.
ALLOWED = {
    "serializer/kernels/table.py",
    *(f"runner/operators/{name}.py" for name in ("guards", "view_ops", "prim_ops")),
    "serializer/verify/number_bounds.py",
}


def test_nobody_else_lists_kernels():
    """Strings that name kernels are in the table, and beside what implements them."""
    known = set(runtime_kernels())
    short = {name.partition("::")[2] for name in known if "." in name}
    found: dict[str, int] = {}
    for folder in (ROOT / "packages").glob("*/src/lowerdeck"):
        for module in folder.rglob("*.py"):
            texts = [
                node.value
                for node in ast.walk(ast.parse(module.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            words = {word for text in texts for word in text.split()}
            if (count := len(words & (known | short))) > 4:
                found[module.relative_to(folder).as_posix()] = count
    assert found.keys() - ALLOWED == set()
    assert ALLOWED - found.keys() == set(), "no longer needed"
