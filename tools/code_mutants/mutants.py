"""Small changes of sources, made by cosmic-ray's operators, and a sample of them."""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# These two require names of variables, one pair at a time.
_NEED_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}
_CONTEXT = 3


@dataclass(frozen=True)
class Mutant:
    """One change of one file, as text, so that it applies to other versions of the file too.

    Attributes:
        path: The file, relative to the root of the repository.
        line: Where the change begins in the version that it was drawn from.
        operator: The operator of cosmic-ray.
        before: The changed lines, with three lines of context on each side.
        after: What replaces them.
    """

    path: str
    line: int
    operator: str
    before: str
    after: str

    @property
    def identity(self) -> str:
        """A name that does not depend on the version of the file."""
        text = f"{self.path}\n{self.before}\n{self.after}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def apply(self, root: Path) -> tuple[str, int] | None:
        """Return the changed text and its first changed line; None if the lines are not there."""
        file = root / self.path
        text = file.read_text() if file.exists() else ""
        if text.count(self.before) != 1:
            return None
        first = text[: text.index(self.before)].count("\n") + 1
        shift = next(
            number
            for number, (one, other) in enumerate(
                zip(self.before.splitlines(), self.after.splitlines(), strict=False)
            )
            if one != other
        )
        return text.replace(self.before, self.after), first + shift

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


def sample(root: Path, paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants with another meaning, at different places of the sources.

    A comparison has ten variants and ``True`` has one: places are drawn first, then a variant.
    """
    draw = random.Random(seed)
    places = sorted({(path, position) for path in paths for position in _positions(path)})
    draw.shuffle(places)
    drawn: list[Mutant] = []
    for path, position in places:
        if len(drawn) == count:
            break
        variants = [
            (name, occurrence)
            for start, name, occurrence in _occurrences(path)
            if start == position
        ]
        name, occurrence = draw.choice(variants)
        text = path.read_text()
        changed = str(mutate_code(text, get_operator(name)(), occurrence))
        if _meaning(changed) not in {None, _meaning(text)}:
            mutant = _as_text(path.relative_to(root), name, text, changed)
            if text.count(mutant.before) == 1:
                drawn.append(mutant)
    return drawn


def _as_text(path: Path, operator: str, text: str, changed: str) -> Mutant:
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    edits = [edit for edit in matcher.get_opcodes() if edit[0] != "equal"]
    (_, first, _, new_first, _), (_, _, last, _, new_last) = edits[0], edits[-1]
    above, below = min(_CONTEXT, first), min(_CONTEXT, len(old) - last)
    return Mutant(
        str(path),
        first + 1,
        operator.removeprefix("core/"),
        "".join(old[first - above : last + below]),
        "".join(new[new_first - above : new_last + below]),
    )


def _positions(path: Path) -> set[tuple[int, int]]:
    return {start for start, _, _ in _occurrences(path)}


@functools.cache
def _occurrences(path: Path) -> list[tuple[tuple[int, int], str, int]]:
    found = []
    nodes = list(ast_nodes(get_ast(path.read_text())))
    for name in sorted(set(operator_names()) - _NEED_ARGUMENTS):
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                found.append((start, name, occurrence))
                occurrence += 1
    return found


def statement_lines(source: str, line: int) -> Sequence[int] | None:
    """Return the lines of the statement, or of its head, that contains ``line``.

    None: it runs when the module is imported, not in a test.
    """
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not inside:
        return None  # A decorator: its line is before that of the function.
    statement = max(inside, key=lambda node: node.lineno)
    functions = [node for node in inside if isinstance(node, ast.FunctionDef)]
    last = statement.end_lineno or statement.lineno
    body = getattr(statement, "body", None)
    if body:
        last = max(statement.lineno, body[0].lineno - 1)
    if not functions or (statement is functions[-1]):
        return None
    return range(statement.lineno, last + 1)


class _WithoutAnnotations(ast.NodeTransformer):
    """Remove what no call can observe.

    Annotations; ``strict`` of zip, which only asserts; ``slots`` of dataclasses.
    """

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        return None if node.arg in {"strict", "slots"} else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def _meaning(source: str) -> str | None:
    """Return the code without its annotations, or None if it does not parse."""
    try:
        return ast.dump(_WithoutAnnotations().visit(ast.parse(source)))
    except SyntaxError:
        return None
