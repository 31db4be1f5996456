"""Names in generated code: children, variables, objects and operator functions."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from lowerdeck.unflatten._torch_private import (
    NATIVE_FUNCTIONS,
    buffers_of,
    children_of,
    packet_name,
    parameters_of,
)
from lowerdeck.unflatten.call_signature import is_name
from lowerdeck.unflatten.metadata import PRIVATE, UNCHANGED

_SPECIALIZATION = re.compile(r"(.+)\.\.(\d+)", re.DOTALL)

OWN_NAMES = frozenset(
    {
        "graph",
        "graph_module",
        "code",
        "recompile",
        "finalize",
        "type_name",
        "print_readable",
        "call_modules",
        "swappable",
        "meta",
        "input_placeholders",
        "graph_signature",
        "module_call_graph",
        "range_constraints",
        "flat_args_adapter",
        "check_input_constraints",
        PRIVATE,
        "__copy__",
        "__getitem__",
    }
)
"""Attributes of our modules that ``torch.nn.Module`` lacks. Attribute access does not reach a
model's child or state of that name.
"""

RESERVED_NAMES: frozenset[str] = (
    frozenset(dir(torch.nn.Module())) | frozenset(keyword.kwlist) | OWN_NAMES
)
"""Names for which attribute access does not reach a module's children and state."""


def call_target(path: str, specialization: int | None) -> str:
    """Return the call target of child ``path`` or of its specialization."""
    # No module's path has two dots in a row.
    return path if specialization is None else f"{path}..{specialization}"


def split_call_target(target: str) -> tuple[str, int | None]:
    """Return the child's path, and its specialization index or None if it has only one."""
    match = _SPECIALIZATION.fullmatch(target) if ".." in target else None
    return (match[1], int(match[2])) if match else (target, None)


def lookup(module: torch.nn.Module, name: str) -> Any:
    """Return the child, parameter or buffer ``name``, even if a method has that name."""
    for table in (children_of(module), parameters_of(module), buffers_of(module)):
        if name in table:
            # Not from the dict: symbolic traces patch this method to record reads.
            return torch.nn.Module.__getattr__(module, name)
    return getattr(module, name)


def inner_child(module: torch.nn.Module, name: str) -> Any:
    """Return a nested child; a wrapper that replaced the outer one may forward the name."""
    child = children_of(module).get(name)
    return lookup(module, name) if child is None else child


SERIAL = re.compile(r"(_\d+)+$")
"""Numeric suffix of a node name."""

_WORD = re.compile(r"[^0-9a-zA-Z_]+")


class Names:
    """Names used in one function.

    Attributes:
        names: Global name and value of each object.
        parameters: Parameter names, which no global may get.
        local: The variable or expression of each node.
        taken: Names that no variable may get.
    """

    def __init__(self) -> None:
        self.names: dict[str, object] = {}
        self.parameters: set[str] = set()
        self.local: dict[Node, str] = {}
        self.taken: set[str] = set(_PYTHON_NAMES)
        self._by_object: dict[object, str] = {}
        self._bases: dict[Node, str] = {}
        self._used: dict[str, int] = {}
        self._numbers: dict[str, int] = {}

    def object_name(self, value: object, hint: str = "") -> str:
        """Return the global name of an object in the function.

        Args:
            hint: Base of a new name; by default the object's own name.
        """
        # Equal devices and dtypes need not be identical objects.
        key = (type(value), repr(value)) if isinstance(value, BY_TEXT) else id(value)
        name = self._by_object.get(key)
        if name is None:
            words = str(hint or getattr(value, "__name__", None) or _words(value))
            if _PYTHON_NAMES.get(words) is value and words not in self.parameters:
                return words
            base = "_" + _WORD.sub("_", words).strip("_")[:40]
            name, number = base, self._numbers.get(base, 1)
            while name in self.names or name in self.parameters:
                name, number = f"{base}_{number}", number + 1
            self._numbers[base] = number
            self._by_object[key] = name
            self.names[name] = value
        return name

    def bind(self, node: Node, base: str = "", *, heir_of: Sequence[Node] = ()) -> str:
        """Return a new variable for ``node``.

        Args:
            base: Prefix of the name.
            heir_of: Dead values; if one of them has the same base, its variable is reused.
        """
        # Named after the operator, not the node, so that equal modules get equal source.
        base = base or _base(node)
        self._bases[node] = base
        for source in heir_of:
            if self._bases.get(source) == base:
                # A chain of the same operator reuses one variable.
                name = self.local[node] = self.local[source]
                return name
        name = self.local[node] = self.variable(base)
        return name

    def variable(self, base: str) -> str:
        """Return a new variable with the prefix ``base``."""
        number = self._used.get(base, 0)
        name = f"{base}_{number}" if number else base
        while name in self.taken or not is_name(name):
            number += 1
            name = f"{base}_{number}"
        self._used[base] = number + 1
        self.taken.add(name)
        return name


def _words(value: object) -> str:
    """Return a descriptive name for an object, the same in all processes."""
    return str(value) if isinstance(value, BY_TEXT) else type(value).__name__


def _base(node: Node) -> str:
    if node.op in {"call_module", "get_attr"}:
        words = split_call_target(str(node.target))[0].rpartition(".")[2]
    elif node.op == "placeholder":
        words = node.name
    else:
        target = node.target
        words = str(packet_name(target) or getattr(target, "__name__", str(target)))
    return _variable(words)


@lru_cache(4096)
def _variable(words: str) -> str:
    """Return a variable name without a node's numeric suffix."""
    base = SERIAL.sub("", _WORD.sub("_", words)).lstrip("_") or "value"
    if base[0].isdigit():
        return "value" if base.isdigit() else f"value_{base}"
    return base


BY_TEXT = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PYTHON_NAMES: dict[str, object] = {
    "self": None,
    **{value.__name__: value for value in (getattr, slice, type, len, tuple, list, dict)},
}
"""Builtins used in generated code unless a parameter shadows them."""


# Functions.


def _aten(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


_OF_TORCH = (
    "abs acos asin atan ceil clone cos cosh erf exp expm1 floor isfinite isinf isnan log log10 "
    "log1p log2 logical_not neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh "
    "square add.Tensor sub.Tensor mul.Tensor div.Tensor atan2 maximum minimum logical_and "
    "logical_or eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar "
    "gt.Tensor gt.Scalar ge.Tensor ge.Scalar "
    "matmul mm bmm addmm layer_norm group_norm embedding dropout batch_norm transpose.int permute "
    "t reshape unsqueeze squeeze.dim cat stack flatten.using_ints select.int narrow chunk "
    "split_with_sizes where.self softmax.int log_softmax.int mean.dim sum.dim_IntList "
    "index_select gather cumsum conv1d conv2d conv3d rms_norm repeat_interleave.self_int "
    "masked_fill.Scalar masked_fill.Tensor tril triu"
)
_NATIVE = "linear gelu silu scaled_dot_product_attention"

FAST: dict[Any, Callable[..., Any]] = {
    **{_aten(name): getattr(NATIVE_FUNCTIONS, name) for name in _NATIVE.split()},
    **{_aten(name): getattr(torch, name.partition(".")[0]) for name in _OF_TORCH.split()},
}
"""Functions that implement operators with positional arguments."""

METHODS: dict[Any, str] = {
    **{_aten(name): name for name in ("view", "expand")},
    _aten("sym_size.int"): "size",
}
"""Methods of the first argument that implement operators. Unlike ``Tensor.view(x)``, method calls
also work on proxies of a symbolic trace.
"""

KEYWORDS = frozenset({"alpha", "rounding_mode", "dtype", "approximate", "memory_format"})
"""Keywords with equal names in these functions and in the operator schemas."""

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def batch_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    *options: Any,
) -> Any:
    """Run a decomposed program's batch norm on copies of the running statistics.

    Backward needs the statistics that were read, but the program overwrites them right after.
    """
    return _BATCH_NORM(value, weight, bias, running_mean.clone(), running_var.clone(), *options)


def callable_for(target: Any, keywords: Any) -> Any:
    """Return the function that implements ``target`` with these keywords in generated code."""
    if target is _BATCH_NORM and not keywords:
        return batch_norm
    if keywords and not KEYWORDS.issuperset(keywords):
        return target
    return FAST.get(target, target)


_CHILD_CALL = re.compile(
    rf"\((\w+)\.forward if .*?\.get\({UNCHANGED!r}\) == (['\"])(.*?)\2 and \w+ > \d "
    r"else (?:\1|\w+\(self, \1, \2\3\2\))\)"
)
"""Expression in generated code that selects the callable of a child."""


def readable(text: str) -> str:
    """Return generated code with child calls in eager form: ``self.layers[0](x)``."""

    def child(match: re.Match[str]) -> str:
        parts = match[3].split(".")
        return "self" + "".join(f".{part}" if is_name(part) else f"[{part}]" for part in parts)

    return _CHILD_CALL.sub(child, text)
