"""Small changes of sources, made by cosmic-ray's operators, and a sample of them."""

from __future__ import annotations

import ast
import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# These two ask for names of variables, one pair at a time.
_NEED_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    operator: str
    occurrence: int
    line: int

    def source(self) -> str:
        """Return the changed text of the file."""
        operator = get_operator(self.operator)()
        return str(mutate_code(self.path.read_text(), operator, self.occurrence))

    def identity(self) -> str:
        """Return a name that stays the same for as long as the file does."""
        text = f"{self.path.name} {self.operator} {self.occurrence}\n{self.path.read_text()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample(paths: Iterable[Path], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants that mean something else, of different places in the sources.

    A comparison has ten variants and ``True`` has one: places are drawn first, then a variant.
    """
    places: dict[tuple[Path, tuple[int, int]], list[Mutant]] = {}
    for path in paths:
        for position, mutant in _mutants(path):
            places.setdefault((path, position), []).append(mutant)
    draw = random.Random(seed)
    drawn = sorted(places)
    draw.shuffle(drawn)
    found: list[Mutant] = []
    for place in drawn:
        if len(found) == count:
            break
        mutant = draw.choice(places[place])
        if _meaning(mutant.source()) not in {None, _meaning(mutant.path.read_text())}:
            found.append(mutant)
    return found


def _mutants(path: Path) -> Iterator[tuple[tuple[int, int], Mutant]]:
    nodes = list(ast_nodes(get_ast(path.read_text())))
    for name in sorted(set(operator_names()) - _NEED_ARGUMENTS):
        operator, occurrence = get_operator(name)(), 0
        for node in nodes:
            for start, _ in operator.mutation_positions(node):
                yield start, Mutant(path, name, occurrence, start[0])
                occurrence += 1


class _WithoutWords(ast.NodeTransformer):
    """Takes out what no call can tell.

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
    """Return the code without its words, or None where it is none."""
    try:
        return ast.dump(_WithoutWords().visit(ast.parse(source)))
    except SyntaxError:
        return None
