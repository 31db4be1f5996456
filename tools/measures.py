"""The size and habits of each package in one table: ``python -m tools.measures``.

Code lines are lines that hold a token of code: no blanks, comments or docstrings. Functions are
measured without their docstrings. ``docs/explanation/measures.md`` has the table of a release.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG = 50
_SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


@dataclass(frozen=True, slots=True)
class Module:
    """What one source file holds."""

    path: Path
    lines: int
    code: int
    comments: int
    functions: int
    long: list[str]
    public: int
    documented: int

    @classmethod
    def of(cls, path: Path) -> Module:
        """Measure a file.

        Args:
            path: A Python source.
        """
        source = path.read_text()
        tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        spoken = {
            line
            for token in tokens
            if token.type not in _SILENT
            for line in range(token.start[0], token.end[0] + 1)
        }
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        public = [
            node
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name[0] != "_"
        ]
        return cls(
            path,
            source.count("\n"),
            len(spoken - set(_docstring_lines(tree))),
            sum(token.type == tokenize.COMMENT for token in tokens),
            len(functions),
            [node.name for node in functions if _length(node) > LONG],
            len(public),
            sum(ast.get_docstring(node) is not None for node in public),
        )


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        # Attributes of classes and modules are documented by strings below them.
        body = node.body[:1] if isinstance(node, ast.FunctionDef) else node.body
        for statement in body:
            if not isinstance(statement, ast.Expr):
                continue
            value = statement.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from range(statement.lineno, (statement.end_lineno or 0) + 1)


def _length(function: ast.FunctionDef) -> int:
    told = ast.get_docstring(function, clean=False)
    documented = told.count("\n") + 1 if told else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def modules(package: str) -> list[Module]:
    """Return the measured sources of a package.

    Args:
        package: Its folder, such as ``graph-fuser``.
    """
    return [Module.of(path) for path in sorted(ROOT.glob(f"packages/{package}/src/**/*.py"))]


def row(name: str, found: list[Module], test_lines: int) -> str:
    """Return the row of a package.

    Args:
        name: Its name.
        found: Its modules.
        test_lines: Lines of its own tests.
    """
    lines = [module.lines for module in found]
    total = max(sum(lines), 1)
    folders = Counter(m.path.parent for m in found if m.path.name != "__init__.py")
    cells = (
        name,
        len(found),
        f"{statistics.median(lines):.0f} / {max(lines)}",
        sum(module.code for module in found),
        f"{sum(len(m.long) for m in found)} of {sum(m.functions for m in found)}",
        f"{100 * sum(m.comments for m in found) / total:.1f}",
        f"{100 * sum(m.documented for m in found) / max(sum(m.public for m in found), 1):.0f} %",
        f"{test_lines / total:.2f}",
        folders.most_common(1)[0][1],
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def table() -> str:
    """Return the table of all packages, in Markdown."""
    heads = (
        *("package", "files", "lines, median / longest", "code lines"),
        *(f"functions over {LONG} lines", "comments per 100 lines", "public names documented"),
        *("test lines per source line", "modules in one folder"),
    )
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    every: list[Module] = []
    tests = 0
    for folder in sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")):
        found = modules(folder)
        own = [p.read_text().count("\n") for p in ROOT.glob(f"packages/{folder}/tests/**/*.py")]
        rows.append(row(folder, found, sum(own)))
        every += found
        tests += sum(own)
    shared = [p.read_text().count("\n") for p in (ROOT / "tests").glob("**/*.py")]
    rows.append(row("all, with tests/", every, tests + sum(shared)))
    return "\n".join(rows)


def parts(least: int) -> dict[str, int]:
    """Return the code lines of each large folder, such as ``emitter/passes``.

    What lies in a package's own folder counts as ``emitter``.

    Args:
        least: Folders with fewer lines are left out.
    """
    found: Counter[str] = Counter()
    for path in ROOT.glob("packages/*/src/lowerdeck/**/*.py"):
        below = path.relative_to(ROOT).parts[4:-1]  # Below packages/NAME/src/lowerdeck.
        found["/".join(below[:2])] += Module.of(path).code
    return {name: lines for name, lines in found.items() if lines >= least}


def write(page: Path) -> None:
    """Put the table into a page, in the place of the one that begins with the same heads.

    Args:
        page: The page.
    """
    made = table()
    text = page.read_text()
    before, _, rest = text.partition(made.splitlines()[0])
    page.write_text(before + made + "\n\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write(ROOT / "docs/explanation/measures.md")
    else:
        print(table())
