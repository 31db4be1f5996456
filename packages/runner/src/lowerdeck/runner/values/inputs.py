"""Flatten, check and bind inputs, and unflatten outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowerdeck.runner._torch_private import flatten_like, leaf_paths, read_structure
from lowerdeck.runner.errors import InputError
from lowerdeck.runner.values.arena import strides_of
from lowerdeck.runner.values.tensors import Origin, TensorSpec
from lowerdeck.torch_base import pytree

MAX_TEXT = 1 << 20
"""Limit of a serialized structure, in characters."""
MAX_DEPTH = 32
_LONGEST_KEY = 100
_SEQUENCES = ("builtins.tuple", "builtins.list")
_MAPPINGS = ("builtins.dict", "collections.OrderedDict")
_OTHERS = (None, "collections.namedtuple")


class Signature:
    """Pytree structure of the inputs and outputs of a method.

    Args:
        encoded_inputs: Serialized pytree spec of ``(args, kwargs)``; may be empty.
        encoded_outputs: Serialized pytree spec of the result; may be empty.

    Attributes:
        names: Name of each flat input, such as ``args[1]['x']``.
        output_names: Name of each flat output, such as ``output 0 ['logits']``.
    """

    def __init__(
        self, encoded_inputs: str, encoded_outputs: str, input_count: int, output_count: int
    ) -> None:
        self._inputs = _spec(encoded_inputs, input_count)
        self._outputs = _spec(encoded_outputs, output_count)
        self._count = input_count
        self.names: list[str] = [f"inputs[{index}]" for index in range(input_count)]
        if self._inputs is not None:
            self.names = [_argument_name(path) for path in leaf_paths(self._inputs)]
        paths = [] if self._outputs is None else leaf_paths(self._outputs)
        self.output_names: list[str] = [
            f"output {number}" + (f" {path}" if path not in ("", f"[{number}]") else "")
            for number, path in enumerate(paths or [""] * output_count)
        ]

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flat inputs in the method's order.

        Args:
            args: Positional inputs, flat or in the model's structure.
            kwargs: Keyword inputs of the model.

        Raises:
            InputError: Neither the number nor the structure of the inputs matches the method.
        """
        if not kwargs and len(args) == self._count and all(map(_is_leaf, args)):
            return list(args)
        if self._inputs is not None:
            leaves = flatten_like((tuple(args), dict(kwargs)), self._inputs)
            if leaves is not None:
                return leaves
        if not kwargs and len(args) == self._count:
            return list(args)
        named = f" and {len(kwargs)} by name ({', '.join(kwargs)})" if kwargs else ""
        raise InputError(
            f"{len(args)} inputs by position{named} given; the method takes {self._count}: "
            f"{', '.join(self.names) or 'none'}"
        )

    def unflatten(self, outputs: list[Any]) -> Any:
        """Return ``outputs`` in the model's structure, or as a list if it is unknown."""
        return outputs if self._outputs is None else pytree.tree_unflatten(outputs, self._outputs)


def _spec(text: str, count: int) -> Any:
    """Return the pytree spec encoded by ``text`` if it has ``count`` leaves, else None.

    The structure is optional and untrusted: without it, the method still takes flat inputs.
    """
    if not text or len(text) > MAX_TEXT:
        return None
    try:
        version, node = json.loads(text)
        is_safe = _make_plain(node, MAX_DEPTH)
        spec = read_structure(json.dumps([version, node])) if is_safe else None
    except Exception:  # torch's reader raises any error for a malformed text
        return None
    return spec if spec is not None and spec.num_leaves == count else None


def _make_plain(node: Any, depth: int) -> bool:
    """Replace classes by dictionaries, in place; return whether torch's reader imports no module.

    Classes with a key for each child, such as ``ModelOutput``, become dictionaries. torch's reader
    imports modules for other containers and for enumerations in contexts. Nesting and keys are
    limited as well, because messages show the path to a leaf.
    """
    kind, context = node["type"], node["context"]
    if kind in _SEQUENCES:
        if context != "null":
            return False
    elif kind not in _OTHERS:
        keys = json.loads(context)
        if not isinstance(keys, list) or not all(map(_is_key, keys)):
            return False
        if kind not in _MAPPINGS:
            node["type"] = "builtins.dict"
    children = node["children_spec"]
    return not children or (depth > 0 and all(_make_plain(child, depth - 1) for child in children))


def _is_key(key: object) -> bool:
    return isinstance(key, str | int) and len(str(key)) <= _LONGEST_KEY


def _is_leaf(value: object) -> bool:
    return isinstance(value, (torch.Tensor, int, float, str)) or value is None


def _argument_name(path: str) -> str:
    """Return a name such as ``args[1]['x']`` for a path in ``(args, kwargs)``."""
    if path.startswith("[0]"):
        return "args" + path[3:]
    return "kwargs" + path[3:] if path.startswith("[1]") else "inputs" + path


Check = Callable[[Any], None]
_CURES = {
    (0, 2, 3, 1): "call .contiguous(memory_format=torch.channels_last) on it",
    (0, 2, 3, 4, 1): "call .contiguous(memory_format=torch.channels_last_3d) on it",
}


def bind_input(name: str, tensor: torch.Tensor, spec: TensorSpec) -> tuple[Check, Check]:
    """Return functions that check a tensor input and bind it.

    Args:
        name: Argument name, for messages.
        tensor: Register of the method.
    """

    def check(value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            _refuse(name, f"is a {type(value).__name__}; expected a tensor")
        if value.layout is not torch.strided or value.device.type != "cpu":
            _refuse(
                name,
                f"is a {value.layout} tensor on {value.device}; expected a dense one on the CPU",
            )
        if value.dtype is not spec.dtype:
            _refuse(name, f"is {value.dtype}; expected {spec.dtype}")
        if value.shape != spec.sizes:
            _check_sizes(name, value, spec)
        if not value.permute(spec.dim_order).is_contiguous():
            _refuse_layout(name, value, spec)
        if value.is_conj() or value.is_neg():
            _refuse(name, "is a lazy conjugate or negative; call resolve_conj() and resolve_neg()")

    if spec.origin is Origin.CALLER:

        def set_pointer(value: torch.Tensor) -> None:
            tensor.set_(
                value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
            )

        return check, set_pointer

    def copy_in(value: torch.Tensor) -> None:
        if tensor.shape != value.shape:
            tensor.as_strided_(value.shape, strides_of(value.shape, spec.dim_order))
        tensor.copy_(value)

    return check, copy_in


def bind_fixed(name: str, expected: object) -> Check:
    """Return a function that checks an input that export specialized to a constant.

    Args:
        name: Argument name, for messages.
    """

    def check(value: Any) -> None:
        # NaN equals NaN here.
        nan = value != value and expected != expected
        if type(value) is not type(expected) or (value != expected and not nan):
            _refuse(name, f"is {value!r}; the program is specialized to {expected!r}")

    return check


def _check_sizes(name: str, value: torch.Tensor, spec: TensorSpec) -> None:
    sizes, expected = list(value.shape), list(spec.sizes)
    if not spec.dynamic:
        _refuse(name, f"has shape {sizes}; expected {expected}")
    if len(sizes) != len(expected) or any(a > b for a, b in zip(sizes, expected, strict=True)):
        _refuse(
            name, f"has shape {sizes}; expected at most {expected} ({len(expected)} dimensions)"
        )


def _refuse_layout(name: str, value: torch.Tensor, spec: TensorSpec) -> None:
    order = list(spec.dim_order)
    cure = _CURES.get(spec.dim_order)
    if spec.contiguous:
        cure = "call .contiguous() on it"
    elif cure is None:
        back = [order.index(dim) for dim in range(len(order))]
        cure = f"call .permute({order}).contiguous().permute({back}) on it"
    # Report strides: a tensor that is not dense may have the expected dim order.
    _refuse(
        name,
        f"has strides {list(value.stride())}; expected "
        f"{list(strides_of(value.shape, order))} for a dense tensor in dim order {order}: {cure}",
    )


def _refuse(name: str, problem: str) -> None:
    raise InputError(f"{name} {problem}", argument=name)
