"""Upper bounds of dynamic dimensions, for memory planning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from lowerdeck.emitter._torch_private import dimension_names
from lowerdeck.emitter.errors import EmitterError
from lowerdeck.torch_base import expression_of, expression_range, size_range, varies, with_parts

Bounds: TypeAlias = int | Mapping[str, int | Mapping[int, int]]
"""Upper bounds: one number for all unbounded input dimensions, or a mapping by name.

A key is the name of a dimension (of its ``torch.export.Dim``, a symbol such as ``s77``, or ``x_0``
for dimension 0 of input ``x``), the symbol of a data-dependent size (``u0``), or an input with a
mapping of its dimensions: ``{"batch": 8, "tokens": {1: 512}}``.
"""


def bounded(
    programs: Mapping[str, ExportedProgram], bounds: Bounds | None
) -> dict[str, ExportedProgram]:
    """Return programs with upper bounds for dynamic dimensions; the given ones are unchanged.

    Data-dependent sizes are bounded by the numel of masks and ``nonzero`` inputs, and by
    assertions (``torch._check(n <= x.shape[0])``, sizes of a split with a known sum).

    Args:
        programs: The program of each method; the results share their graphs and tensors.
        bounds: The upper bounds; None to keep those of the programs.

    Raises:
        EmitterError: A bound is not a positive integer, is outside of the program's range, or
            names an unknown dimension.

    Example:
        >>> import torch
        >>> from lowerdeck.emitter import bounded, emit
        >>> batch = ({0: torch.export.Dim.AUTO},)
        >>> program = torch.export.export(
        ...     torch.nn.ReLU(), (torch.ones(2, 3),), dynamic_shapes=batch
        ... )
        >>> emitted = emit(bounded({"forward": program}, 64))
        >>> emitted.program.execution_plan[0].non_const_buffer_sizes
        [0, 768]
    """
    bounds = {} if bounds is None else bounds
    _check_numbers(bounds)
    used: set[tuple[str, int | None]] = set()
    result = {name: _bounded(program, bounds, used) for name, program in programs.items()}
    requested = bounds if isinstance(bounds, Mapping) else {}
    unused = [
        repr(name) if dim is None else f"dimension {dim} of {name!r}"
        for name, bound in requested.items()
        for dim in (bound if isinstance(bound, Mapping) else (None,))
        if (name, dim) not in used
    ]
    if unused:
        names = {name for p in programs.values() for name in names_of(p.graph).values()}
        raise EmitterError(
            f"bounds: found {', '.join(unused)}, expected names of dynamic dimensions: "
            f"{', '.join(map(repr, sorted(names))) or 'no program has any'}"
        )
    return result


def names_of(graph: Graph) -> dict[str, str]:
    """Return the name of each symbol: the user's ``Dim`` name, or else input and position."""
    names: dict[str, str] = {}
    for node, dim, size in _dynamic_dimensions(graph):
        symbol = str(expression_of(size))
        if symbol not in names:
            names |= dimension_names(size)
            names.setdefault(symbol, f"{node.name}_{dim}")
    return names


def _check_numbers(bounds: Bounds) -> None:
    by_name = bounds if isinstance(bounds, Mapping) else {"all dimensions": bounds}
    for name, bound in by_name.items():
        for number in bound.values() if isinstance(bound, Mapping) else (bound,):
            if type(number) is not int or number < 1:
                raise EmitterError(
                    f"bounds: found {number!r} for {name if bound is bounds else repr(name)}, "
                    "expected a size of 1 or more, or for an input a dict from dimensions to sizes"
                )


def _dynamic_dimensions(graph: Graph) -> Iterator[tuple[Node, int, Any]]:
    """Yield input dimensions whose size is a single symbol: placeholder, dimension, size."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if varies(size) and expression_of(size).is_symbol:
                yield node, dim, size


def _bounded(
    program: ExportedProgram, bounds: Bounds, used: set[tuple[str, int | None]]
) -> ExportedProgram:
    ranges = dict(program.range_constraints)
    names = names_of(program.graph)
    dimensions = list(_dynamic_dimensions(program.graph))
    for node, dim, size in dimensions:
        symbol = expression_of(size)
        lower, upper = size_range(size, ranges)
        bound = upper
        if not isinstance(bounds, Mapping):
            bound = bounds if upper is None else upper
        else:
            by_dimension = bounds.get(node.name)
            requested: dict[tuple[str, int | None], Any] = {
                (name, None): bounds.get(name) for name in (names[str(symbol)], str(symbol))
            }
            if isinstance(by_dimension, Mapping):
                requested[node.name, dim] = by_dimension.get(dim)
            numbers = {key: number for key, number in requested.items() if isinstance(number, int)}
            used.update(numbers)
            bound = min(numbers.values(), default=upper)
        if bound is None or bound == upper:
            continue
        if bound < lower or (upper is not None and bound > upper):
            raise EmitterError(
                f"bounds: found {bound} for {names[str(symbol)]!r}, but the program was exported "
                f"for {lower} to {'any size' if upper is None else upper}"
            )
        value_range = ranges[symbol]
        ranges[symbol] = type(value_range)(value_range.lower, bound)
    _bound_data_dependent_sizes(program.graph, ranges)
    for symbol in ranges.keys() - {expression_of(size) for _, _, size in dimensions}:
        number = bounds.get(str(symbol)) if isinstance(bounds, Mapping) else None
        if isinstance(number, int):
            used.add((str(symbol), None))
            _lower_upper_bound(ranges, symbol, number)
    if ranges == program.range_constraints:
        return program
    return with_parts(program, range_constraints=ranges)


_ATEN = torch.ops.aten
# Operators that select elements by a mask.
_PICK = frozenset({_ATEN.nonzero.default, _ATEN.where.default, _ATEN.index.Tensor})


def _bound_data_dependent_sizes(graph: Graph, ranges: dict[Any, Any]) -> None:
    """Bound the symbols of data-dependent sizes in ``ranges``."""
    for node in graph.nodes:
        if node.target in _PICK:
            for symbol in node.meta.get("unbacked_bindings") or ():
                _lower_upper_bound(ranges, symbol, _max_selected(node, ranges))
        elif node.target is _ATEN._assert_scalar.default and isinstance(node.args[0], Node):
            condition = expression_of(node.args[0].meta["val"])
            for symbol in getattr(condition, "free_symbols", ()):
                _lower_upper_bound(ranges, symbol, _implied_bound(condition, symbol, ranges))


def _max_selected(node: Node, ranges: Mapping[Any, Any]) -> int | None:
    """Return an upper bound on the number of elements that the masks of a call select."""
    is_index = node.target is _ATEN.index.Tensor
    indices: Any = node.args[1] if is_index else node.args
    values = [node.meta["val"] for node in indices if isinstance(node, Node)]
    counts = [
        _elements(index_, ranges)
        for index_ in values
        if not is_index or index_.dtype is torch.bool
    ]
    return None if None in counts else max(filter(None, counts), default=None)


def _elements(tensor: torch.Tensor, ranges: Mapping[Any, Any]) -> int | None:
    sizes = [size_range(size, ranges)[1] for size in tensor.shape]
    return None if None in sizes else prod(size for size in sizes if size is not None)


def _implied_bound(condition: Any, symbol: Any, ranges: Mapping[Any, Any]) -> int | None:
    """Return the upper bound that a linear condition implies for a symbol, or None."""
    operator = getattr(condition, "rel_op", "")
    if operator not in {"<=", "<", ">=", ">", "=="}:
        return None
    # Normalize to ``difference <= 0``.
    difference = (condition.lhs - condition.rhs).expand()
    difference = -difference if operator in {">=", ">"} else difference
    difference += int(operator in {"<", ">"})
    factor = difference.coeff(symbol)
    other_terms = difference - factor * symbol
    if operator == "==" and factor.is_negative:
        factor, other_terms = -factor, -other_terms
    if not (factor.is_Integer and factor.is_positive) or symbol in other_terms.free_symbols:
        return None
    return expression_range(-other_terms // factor, ranges)[1]


def _lower_upper_bound(ranges: dict[Any, Any], symbol: Any, bound: int | None) -> None:
    value_range = ranges.get(symbol)
    if bound is not None and value_range is not None and bound < value_range.upper:
        ranges[symbol] = type(value_range)(min(value_range.lower, bound), bound)
