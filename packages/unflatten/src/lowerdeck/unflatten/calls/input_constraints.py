"""What the arguments of a program must satisfy, checked with messages that name the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Node

from lowerdeck.torch_base import SYMBOLS, expression_of, plain_number
from lowerdeck.unflatten.calls.carrying import PRIVATE
from lowerdeck.unflatten.calls.recorded_leaves import (
    Recorded,
    may_be_of_type,
    recorded,
    set_fields,
)
from lowerdeck.unflatten.errors import InputConstraintError
from lowerdeck.unflatten.sizes.guards import (
    NOT_SURE,
    Bounds,
    SizeGuards,
    SizeLimits,
    bounds_of,
    varying_sizes,
)

CHECKS = "check_input_constraints"
"""The attribute of the outermost module that tells whether its calls are checked."""


@dataclass(frozen=True, slots=True)
class LeafConstraint:
    """What one leaf must be.

    Attributes:
        path: The argument as the caller writes it, such as ``"d['k']"``.
        shape: For a tensor the size of each dimension: a number or an expression; None otherwise.
        value: For a constant its value; for a symbolic number its expression.
        is_symbolic: Whether ``value`` is an expression.
        dtype: For a tensor its type.
    """

    path: str
    shape: tuple[int | sympy.Expr, ...] | None
    value: object = None
    is_symbolic: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class InputConstraints:
    """The constraints of all leaves.

    Attributes:
        leaves: One for each leaf; None where anything may be passed.
        bounds: Smallest and largest value of each symbol.
        fixed: What of each leaf is the same in all calls.
        paths: How the caller writes each leaf.
        guards: What sizes that vary must meet beside their bounds.
        limits: The same of these leaves, for who exports the program anew.
    """

    leaves: tuple[LeafConstraint | None, ...]
    bounds: Mapping[sympy.Symbol, Bounds]
    fixed: tuple[Recorded, ...] = ()
    paths: tuple[str, ...] = ()
    guards: SizeGuards = field(default_factory=SizeGuards)
    limits: SizeLimits | None = None

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Take what was pickled."""
        set_fields(self, state)

    def check(self, module: torch.nn.Module, *values: Any) -> None:
        """Check the leaves of one call.

        Args:
            module: The module that is called; one that asks for no checks gets none.
            values: The leaves.

        Raises:
            InputConstraintError: One is not what the program was exported for.
        """
        # The model may have a buffer of that name, which an attribute access would find.
        if not module.__dict__[CHECKS]:
            return
        symbols: dict[sympy.Symbol, tuple[int, str]] = {}
        derived: list[tuple[sympy.Expr, int, str]] = []
        for leaf, value in zip(self.leaves, values, strict=True):
            if leaf is None:
                continue
            if isinstance(value, torch.fx.Proxy):
                _check_proxy(leaf, value)
            elif leaf.shape is not None:
                _check_tensor(leaf, value, self.bounds, symbols, derived)
                if value.dtype is not leaf.dtype:
                    _check_dtype(leaf, value, module)
            elif leaf.is_symbolic:
                _check_size(leaf.value, value, leaf.path, self.bounds, symbols, derived)
            elif type(value) is not type(leaf.value) or not _same(value, leaf.value):
                found = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise InputConstraintError(
                    f"Argument {leaf.path!r} was exported as the constant {leaf.value!r}; found "
                    f"{found}. "
                    "Pass that value, or export again."
                )
        for expression, size, path in derived:
            known = {
                symbol: symbols[symbol][0]
                for symbol in expression.free_symbols
                if symbol in symbols
            }
            expected = expression.xreplace(known)
            if expected.is_number and int(expected) != size:
                raise InputConstraintError(
                    f"{path} must be {expression} = {expected} here; found {size}."
                )

        for guard in self.guards.all:
            asked = [symbols[symbol] for symbol in guard.symbols if symbol in symbols]
            sizes = [size for size, _ in asked]
            if len(asked) == len(guard.symbols) and not guard.holds(sizes):
                must = guard.text.format(*(where for _, where in asked))
                found = ", ".join(f"{where} = {size}" for size, where in asked)
                raise InputConstraintError(
                    f"{must} must hold, as it did for what the program was exported with; found "
                    f"{found}. The program has no other side of that branch: pass such sizes, or "
                    f"export again with these. {NOT_SURE}"
                )

    def check_fixed(self, module: torch.nn.Module, *values: Any) -> None:
        """Check what a compiler may look at: constants, ranks and fixed sizes.

        Comparing a size that varies with its bounds would tie what is compiled to the answer.

        Args:
            module: The module that is called; one that asks for no checks gets none.
            values: The leaves.

        Raises:
            InputConstraintError: One is not what the program was exported for.
        """
        if not module.__dict__[CHECKS]:
            return
        for index, want in enumerate(self.fixed):
            if want is not None and not want.fits(values[index]):
                raise InputConstraintError(
                    f"Argument {self.paths[index]!r} was exported as {want}; found another one "
                    "while compiling. Pass that, or export again."
                )
        # Export notes the answer, as it did when the program was made; that of dynamo, which
        # strict export runs, is tied to it.
        is_asked = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
        if is_asked and self.limits is not None and not self.limits.hold_for(values):
            told = self.limits.told(values, self.paths)
            raise InputConstraintError(
                f"The program was exported with {told}. It has no other side of a branch on "
                f"that: export it anew with such sizes, or the model with these. {NOT_SURE}"
            )


def input_constraints(
    placeholders: Sequence[Node],
    paths: Sequence[str],
    ranges: Mapping[sympy.Symbol, Any],
    guards: SizeGuards,
) -> InputConstraints:
    """Return the constraints of a program's inputs.

    Args:
        placeholders: The placeholder of each leaf, with the example value in its meta.
        paths: How the caller writes each leaf.
        ranges: The range of each symbol.
        guards: What its sizes that vary must meet.
    """
    leaves = tuple(_leaf(node, path) for node, path in zip(placeholders, paths, strict=True))
    fixed = tuple(
        recorded(node.meta["val"]) if "val" in node.meta else None for node in placeholders
    )
    limits = guards.limits(varying_sizes([node.meta.get("val") for node in placeholders]))
    return InputConstraints(leaves, bounds_of(ranges), fixed, tuple(paths), guards, limits)


def _leaf(node: Node, path: str) -> LeafConstraint | None:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = tuple(_size(size) for size in value.shape)
        return LeafConstraint(path, shape, dtype=value.dtype)
    if isinstance(value, SYMBOLS):
        expression = _size(value)
        return LeafConstraint(path, None, expression, isinstance(expression, sympy.Basic))
    if isinstance(value, (int, float, str)) or (value is None and "val" in node.meta):
        return LeafConstraint(path, None, value)
    return None


def _size(size: Any) -> Any:
    return expression_of(plain_number(size))


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return math.isnan(found)
    return bool(found == expected)


def _check_proxy(leaf: LeafConstraint, value: torch.fx.Proxy) -> None:
    """Let a symbolic trace hold all that the program does, or refuse it.

    A proxy has no shape to check. A constant is no input, so that a trace would ignore it.
    """
    # Otherwise the tracer runs writes to buffers itself, once, and leaves them out of the trace.
    value.tracer.proxy_buffer_attributes = True
    if leaf.shape is None and not leaf.is_symbolic:
        raise InputConstraintError(
            f"Argument {leaf.path!r} was exported as the constant {leaf.value!r}; found a Proxy "
            "of a symbolic trace, whose value would be ignored. Give that value in concrete_args."
        )


def _check_tensor(
    leaf: LeafConstraint,
    value: Any,
    bounds: Mapping[sympy.Symbol, Bounds],
    symbols: dict[sympy.Symbol, tuple[int, str]],
    derived: list[tuple[sympy.Expr, int, str]],
) -> None:
    if not isinstance(value, torch.Tensor):
        raise InputConstraintError(
            f"Argument {leaf.path!r} must be a tensor; found {type(value).__name__}."
        )
    shape, expected = value.shape, leaf.shape or ()
    if len(shape) != len(expected):
        raise InputConstraintError(
            f"Argument {leaf.path!r} must have {len(expected)} dimensions {_shown(expected)}; "
            "found shape "
            f"{tuple(shape)}."
        )
    for dim, size in enumerate(expected):
        # Compilers may look at this frame alone, with ints of theirs that are of another class.
        if isinstance(size, int):
            if shape[dim] != size:
                raise InputConstraintError(
                    f"{leaf.path}.shape[{dim}] must be {size}; found {shape[dim]}. Export "
                    "with a dynamic "
                    "dimension there to pass other sizes."
                )
        else:
            where = f"{leaf.path}.shape[{dim}]"
            _check_size(size, shape[dim], where, bounds, symbols, derived)


def _check_dtype(leaf: LeafConstraint, value: torch.Tensor, module: torch.nn.Module) -> None:
    """Refuse another type, unless the module was moved to it or autocast converts it."""
    expected, found = leaf.dtype, value.dtype
    if expected is not None and may_be_of_type(expected, value, module.__dict__[PRIVATE].moved):
        return
    raise InputConstraintError(
        f"Argument {leaf.path!r} must be of type {expected}; found {found}. Convert it, move the "
        "module to that type, or export again; check_input_constraints = False runs it as it is."
    )


def _check_size(
    expected: Any,
    size: Any,
    where: str,
    bounds: Mapping[sympy.Symbol, Bounds],
    symbols: dict[sympy.Symbol, tuple[int, str]],
    derived: list[tuple[sympy.Expr, int, str]],
) -> None:
    if not isinstance(expected, sympy.Symbol):
        derived.append((expected, size, where))
        return
    known = symbols.setdefault(expected, (size, where))
    if known[0] != size:
        raise InputConstraintError(
            f"{where} must equal {known[1]} = {known[0]}; found {size}. The program was "
            "exported so."
        )
    low, high = bounds.get(expected, (None, None))
    if low is not None and size < low:
        raise InputConstraintError(f"{where} must be at least {low}; found {size}.")
    if high is not None and size > high:
        raise InputConstraintError(f"{where} must be at most {high}; found {size}.")


def _shown(shape: Sequence[object]) -> str:
    return "(" + ", ".join(str(size) for size in shape) + ")"
