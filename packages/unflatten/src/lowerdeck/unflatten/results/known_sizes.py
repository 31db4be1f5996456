"""Sizes and types of what a call returned that the code after the call has in it.

Export writes down what the model's code asks of a tensor, ``x.shape[1]`` say: as a number, or, of
a size that varies, as what it asks the program's inputs. Another module in a place, or a hook, may
return another size than the one recorded, and eager's code would go on with that. Which numbers
come of a size no program tells: what equals one, or what is often computed of one, counts, where
the model's line does not write that number itself. Whatever is on a line that asks for a size that
has changed, or for how many dimensions there are, is taken for computed of that.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from operator import getitem
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node

from lowerdeck.torch_base import (
    HigherOrderOperator,
    OpOverload,
    arguments_of,
    is_getitem,
    source_frames,
)
from lowerdeck.unflatten._torch_private import packet_name
from lowerdeck.unflatten.calls.signature import flatten_like
from lowerdeck.unflatten.code import TORCH_FOLDER, Check, split_call_target, told
from lowerdeck.unflatten.results.asked_dims import (
    ANY_DIM,
    DIMENSION,
    DimsAsked,
    are_asked,
    asks_rank,
    dims_asked,
    has_unwritten_dims,
    numbers_on,
)
from lowerdeck.unflatten.results.changed_sizes import Changed, changed_with
from lowerdeck.unflatten.results.result_check import ResultCheck, Sizes, sizes_of
from lowerdeck.unflatten.results.returned import RETURNS, structure_check
from lowerdeck.unflatten.results.size_texts import SizeTexts
from lowerdeck.unflatten.sizes.guards import SizeGuards

_NO_SIZES = {"exponent", "alpha", "beta", "p", "eps", "groups", "correction", "ord", "diagonal"}
_ASKS_SIZE = re.compile(r"shape|size|len\(|numel")
_SMALL = 3
"""Up to this a number on a line may as well be a dimension's."""

_SCALES = {"div", "mul", "floor_divide", "floordiv", "truediv", "arange"}
_MAKES = re.compile(
    r"(new_)?(ones|zeros|full|empty|arange|linspace|eye|rand|randn|tensor)(_like)?"
)
_PLAIN = {"_operator", "math", "torch"}
_CONVERTS = {"to", "_to_copy", "scalar_tensor"}
_FIXES = re.compile(r"[^%]* == \d+|\d+ == [^%]*")
"""A condition of sizes that fixes what is computed of them."""

SizesAsked = Callable[[Node], Sequence[frozenset[sympy.Symbol]]]
"""Tells of a call, for each of the flat values that it is given, the symbols in the sizes that the
callee asks of it."""


def result_checks(graph: Graph, sizes_asked: SizesAsked, guards: SizeGuards) -> dict[Node, Check]:
    """Return how results of calls are to be checked, for those that code after them knows.

    Args:
        graph: The graph of one form of a module.
        sizes_asked: Tells what the modules that it calls ask.
        guards: What sizes that vary must meet.
    """
    found: dict[Node, Check] = {}
    calls = graph.find_nodes(op="call_module")
    if not calls:
        return found
    code = _Code(graph, sizes_asked, guards)
    for call in calls:
        for result in _results(call):
            check = code.check_of(call, result)
            if check is not None:
                found[result] = check
        for node in (call, *call.users):
            whole = node.meta.get(RETURNS)
            if whole is not None:
                path, _ = split_call_target(str(call.target))
                found[node] = structure_check(path, node, whole, found)
    return found


def _results(call: Node) -> Iterator[Node]:
    """Yield the tensors that a call returns, or that are taken out of what it returns."""
    queue = [call]
    for node in queue:
        if isinstance(sizes_of(node), Sizes):
            yield node
        else:
            queue += [user for user in node.users if user.target in (getitem, flatten_like)]


@dataclass(frozen=True, slots=True)
class _Use:
    """A number, a symbol or a type that a step of the code is given.

    Attributes:
        value: It.
        node: The step.
        source: What a symbol is read from; None of anything else.
        name: Which argument of the step it is in.
    """

    value: Any
    node: Node
    source: Any = None
    name: str = ""


def _uses(node: Node, sizes_asked: SizesAsked) -> Iterator[_Use]:
    if node.op == "call_module":
        for value, asked in zip(node.args, sizes_asked(node), strict=False):
            for symbol in asked:
                yield _Use(symbol, node, value)
    if node.op == "call_function":
        if not isinstance(node.target, OpOverload):
            if is_getitem(node) or getattr(node.target, "__module__", "") not in _PLAIN:
                return  # a check of ours, say
            named: dict[str, Any] = {"": node.args}
            computes_number = True
        else:
            every = arguments_of(node)
            given = {*list(every)[: len(node.args)], *node.kwargs}
            named = {name: value for name, value in every.items() if name in given}
            checks = str(packet_name(node.target)).startswith(("_assert", "sym_constrain"))
            computes_number = checks or isinstance(sizes_of(node), sympy.Basic)
    elif node.op in {"call_module", "output"}:
        named, computes_number = {"": (node.args, node.kwargs)}, False
    else:
        return
    for name, value in named.items():
        if name in _NO_SIZES or DIMENSION.fullmatch(name):
            continue
        for leaf in _leaves(value):
            if not isinstance(leaf, Node):
                yield _Use(leaf, node, name=name)
            elif not computes_number:
                size = sizes_of(leaf)
                if isinstance(size, sympy.Basic):
                    yield _Use(size, node, leaf)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step))
    elif isinstance(value, (Node, torch.dtype)) or type(value) in {int, float}:
        yield value


class _Code:
    """What the code of a module is given, found by its value: there may be thousands of calls.

    Args:
        graph: The code.
        sizes_asked: Tells what the modules that it calls ask.
        guards: What sizes that vary must meet.
    """

    def __init__(self, graph: Graph, sizes_asked: SizesAsked, guards: SizeGuards) -> None:
        self._guards = guards
        self._order = list(graph.nodes)
        self._index = {node: index for index, node in enumerate(self._order)}
        self._numbers: dict[float, list[_Use]] = {}
        self._steps: dict[float, dict[str, set[tuple[Any, str]]]] = {}
        self._lines: dict[Node, str] = {}
        self._found: dict[tuple[float, bool], list[_Use]] = {}
        self._last_number = -1
        self._on_asking_lines: dict[tuple[DimsAsked, str], list[Node]] = {}
        self._knows_rank: list[Node] = []
        self._symbols: list[_Use] = []
        self._types: dict[torch.dtype, list[_Use]] = {}
        for node in self._order:
            for use in _uses(node, sizes_asked):
                if isinstance(use.value, torch.dtype):
                    self._types.setdefault(use.value, []).append(use)
                elif isinstance(use.value, sympy.Basic):
                    self._symbols.append(use)
                elif math.isfinite(use.value):
                    key = _key(abs(use.value))
                    self._numbers.setdefault(key, []).append(use)
                    if key not in {0, 1}:
                        self._last_number = self._index[node]
        self._find_asking_lines()

    def _find_asking_lines(self) -> None:
        """Find the steps that may be other ones for other sizes, or another rank, of a result."""
        for node in self._order:
            if node.op != "call_function":
                continue
            is_last = any(map(is_getitem, node.users))
            dims: DimsAsked = ()
            line, is_rank_known = "", False
            if isinstance(node.target, HigherOrderOperator):
                # What it runs has graphs of its own.
                dims, is_rank_known = ANY_DIM, True
            elif isinstance(node.target, OpOverload):
                line = self._line(node)
                dims = dims_asked(line)
                is_rank_known = asks_rank(line) or has_unwritten_dims(node, line)
            if dims:
                self._on_asking_lines.setdefault((dims, line), []).append(node)
            if is_rank_known:
                self._knows_rank.append(node)
            if dims or is_last:
                self._last_number = max(self._last_number, self._index[node])

    @cached_property
    def _texts(self) -> SizeTexts:
        return SizeTexts(self._order)

    def check_of(self, call: Node, result: Node) -> ResultCheck | None:
        """Return how a result is to be checked; None if nothing after the call knows it."""
        recorded: Sizes = sizes_of(result)
        dims: list[tuple[int, str]] = []
        shown: list[str] = []
        for dim, size in enumerate(recorded.shape):
            if not isinstance(size, sympy.Basic):
                use, text = self._use_of_number(call, result, dim), str(size)
            else:
                use = self._use_of_symbols(call, size.free_symbols)
                if use is None and self._is_fixed(size):
                    use = self._use_on_asking_line(call, list(changed_with(result, dim)))
                if use is None:
                    continue
                text = self._texts.of(size, self._index[call]) or ""
            if use is not None and text:
                dims.append((dim, _where(use.node)))
                shown.append(text)
        read = next(self._uses_of_type(call, recorded.dtype), None)
        varying = [
            ((0, dim), size)
            for dim, size in enumerate(recorded.shape)
            if isinstance(size, sympy.Basic)
        ]
        limits = self._guards.limits(varying)
        rank = ""
        if self._knows_rank and self._index[self._knows_rank[-1]] > self._index[call]:
            rank = _where(self._next(call, self._knows_rank))
        if not dims and read is None and limits is None and not rank:
            return None
        path, _ = split_call_target(str(call.target))
        where = _where(read.node) if read is not None else ""
        return ResultCheck(path, recorded, tuple(dims), where, rank, tuple(shown), limits)

    def _after(self, call: Node, uses: Sequence[_Use]) -> Iterator[_Use]:
        first = bisect_right(uses, self._index[call], key=lambda use: self._index[use.node])
        return (uses[place] for place in range(first, len(uses)))

    def _use_of_symbols(self, call: Node, symbols: set[sympy.Symbol]) -> _Use | None:
        """Return where a size with one of these is used that is not asked of what was returned."""
        made: set[Node] | None = None
        for use in self._after(call, self._symbols):
            if use.value.free_symbols & symbols:
                if self._index[use.source] < self._index[call]:
                    return use
                made = _made_of(call, self._order[self._index[call] :]) if made is None else made
                if use.source not in made:
                    return use
        return None

    def _use_of_number(self, call: Node, result: Node, dim: int) -> _Use | None:
        """Return where a number is used that may come of a size."""
        if self._last_number <= self._index[call]:
            recorded = sizes_of(result).shape
            changed = [Changed(result, recorded, (dim,))]
        else:
            changed = list(changed_with(result, dim))
        for each in changed:
            if not each.dims:
                return _Use(None, each.node)
            for at in each.dims:
                if not isinstance(each.shape[at], int):
                    continue
                found = self._use_of_size(call, each.shape, at)
                if found is not None:
                    return found
        return self._use_on_asking_line(call, changed)

    def _use_on_asking_line(self, call: Node, changed: Sequence[Changed]) -> _Use | None:
        """Return where a line asks for one of the sizes that changed, of the result's first."""
        for (dims, line), nodes in self._on_asking_lines.items():
            if self._index[nodes[-1]] <= self._index[call]:
                continue
            for number, each in enumerate(changed):
                # What is called on a line may be a variable there when a loop comes back.
                is_made_there = number > 0 and self._line(each.node) == line
                rank = len(each.shape)
                if any(are_asked(dims, at, rank, is_made_there=is_made_there) for at in each.dims):
                    return _Use(None, self._next(call, nodes))
        return None

    def _next(self, call: Node, nodes: Sequence[Node]) -> Node:
        return nodes[bisect_right(nodes, self._index[call], key=self._index.__getitem__)]

    def _is_fixed(self, size: sympy.Expr) -> bool:
        """Return whether export fixed a size that is computed of some that vary.

        A size that varies by itself is held to that, as to all conditions.
        """
        return not size.is_Symbol and any(
            _FIXES.fullmatch(guard.text) and size.free_symbols.issuperset(guard.symbols)
            for guard in self._guards.all
        )

    def _use_of_size(self, call: Node, shape: Sequence[Any], dim: int) -> _Use | None:
        others = [each for at, each in enumerate(shape) if at != dim and isinstance(each, int)]
        products = {shape[dim] * product for product in _products(others)}
        if shape[dim] == 1:
            for use in self._after(call, self._numbers.get(1, ())):
                target = use.node.target
                name = packet_name(target) or getattr(target, "__name__", "")
                if type(use.value) is int and use.value == 1 and name in _SCALES:
                    return use
        often = {_key(each): False for product in products for each in _shares(product)}
        often.update((_key(each), False) for each in _often_of(shape[dim]))
        for value, is_size in {**often, **{_key(product): True for product in products}}.items():
            if value in {0, 1}:
                continue  # of no other use there
            may_be_dimension = is_size and value <= _SMALL
            for use in self._after(call, self._unwritten(value, whole=may_be_dimension)):
                return use
        return None

    def _unwritten(self, value: float, *, whole: bool) -> Sequence[_Use]:
        """Return where a number is used that the model's line does not write.

        Args:
            value: The number.
            whole: Whether whole numbers count though a line writes them.
        """
        key = (value, whole)
        if key not in self._found:
            self._found[key] = [
                use
                for use in self._numbers.get(value, ())
                if (whole and type(use.value) is int) or not self._is_written(value, use.node)
            ]
        return self._found[key]

    def _is_written(self, value: float, node: Node) -> bool:
        """Return whether the model's line of a step has a number, and asks for no size.

        A line that gives it to more steps than it writes it has it from elsewhere too, of a
        function that asks for a size, say. What a loop repeats is one step.
        """
        line = self._line(node)
        if _ASKS_SIZE.search(line):
            return False
        return len(self._steps_of(value)[line]) <= _count(value, line)

    def _steps_of(self, value: float) -> dict[str, set[tuple[Any, str]]]:
        """Return for each line the steps that are given a number."""
        if value not in self._steps:
            steps = self._steps[value] = {}
            for use in self._numbers[value]:
                place = (use.node.target, use.name)
                steps.setdefault(self._line(use.node), set()).add(place)
        return self._steps[value]

    def _line(self, node: Node) -> str:
        if node not in self._lines:
            self._lines[node] = _line(node)
        return self._lines[node]

    def _uses_of_type(self, call: Node, dtype: torch.dtype) -> Iterator[_Use]:
        for use in self._after(call, self._types.get(dtype, ())):
            name, line = str(packet_name(use.node.target)), self._line(use.node)
            if _MAKES.fullmatch(name):
                if str(dtype).removeprefix("torch.") not in line:
                    yield use
            elif name in _CONVERTS and (".dtype" in line or "type_as" in line):
                # What is converted to a type that the line names is so in eager too.
                yield use
        if dtype.is_floating_point:
            info = torch.finfo(dtype)
            for value in (info.max, -info.min, info.eps, info.tiny):
                for part in (value, value / 2):
                    found = self._after(call, self._numbers.get(_key(part), ()))
                    yield from (use for use in found if type(use.value) is float)


def _key(value: float) -> float:
    return float(f"{value:.9g}")


def _count(value: float, line: str) -> int:
    """Return how often a line writes a number."""
    return sum(_key(number) == value for number in numbers_on(line))


def _products(sizes: Sequence[Any]) -> set[int]:
    """Return 1 and the products of some of these, of those that do not vary."""
    numbers = [size for size in sizes if isinstance(size, int)]
    return {
        math.prod(some)
        for count in range(len(numbers) + 1)
        for some in combinations(numbers, count)
    }


def _made_of(call: Node, after: Sequence[Node]) -> set[Node]:
    """Return what is computed of what ``call`` returns."""
    made = {call}
    for node in after:
        if not made.isdisjoint(node.all_input_nodes):
            made.add(node)
    return made


def symbols_asked(graph: Graph, sizes_asked: SizesAsked) -> tuple[frozenset[sympy.Symbol], ...]:
    """Return for each of the flat values that a module takes which symbols it asks the sizes for.

    Args:
        graph: Its graph.
        sizes_asked: Tells the same of the modules that it calls.
    """
    found: list[frozenset[sympy.Symbol]] = []
    for node in graph.find_nodes(op="placeholder"):
        symbols: frozenset[sympy.Symbol] = frozenset()
        for user in node.users:
            if user.target is torch.ops.aten.sym_size.int:
                symbols |= getattr(sizes_of(user), "free_symbols", frozenset())
            elif user.op == "call_module":
                given = zip(user.args, sizes_asked(user), strict=False)
                symbols = symbols.union(*(asked for value, asked in given if value is node))
        found.append(symbols)
    return tuple(found)


def _often_of(size: int) -> Iterator[float]:
    """Yield the numbers that are often computed of a size."""
    yield from (size - 1, size + 1, size // 2, 2 * size, 2 * size - 1, 2 * size + 1)
    if size > 1:
        yield from (1 / (size - 1), 1 / math.log(size), math.log(size))


def _shares(size: int) -> Iterator[float]:
    """Yield by what something is often divided or multiplied that has so many elements."""
    if size > 0:
        yield from (1 / size, 2 / size, math.sqrt(size), 1 / math.sqrt(size))


def _line(node: Node) -> str:
    frames = [one for one in source_frames(node) if not one.file.startswith(TORCH_FOLDER)]
    return frames[-1].code if frames else ""


def _where(node: Node) -> str:
    frames = source_frames(node)
    own = [one for one in frames if not one.file.startswith(TORCH_FOLDER)]
    return told((own or frames)[-1]) if frames else str(node.format_node())
