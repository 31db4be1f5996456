"""Call signature of a generated module: pytree structures of its arguments and its result.

The body of a generated ``forward`` computes on leaves. The signature generates the parameter list,
the lines that flatten the arguments to leaves, and the return statement that unflattens them.
"""

from __future__ import annotations

import keyword
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.errors import InputStructureError
from lowerdeck.unflatten.metadata import ADAPTER

PENDING = "_call"
"""Parameter of generated functions that receives the caller's ``PendingCall``."""

NameObject = Callable[[object], str]
"""Returns the global name of an object in generated code."""

Leaves: TypeAlias = list[Any]
"""The flat arguments of a call."""


class FlatArgsAdapter(ABC):
    """Converts flat arguments from one pytree structure to another.

    ``UnflattenedModule`` uses it for calls whose structure differs from the exported one.

    Example:
        >>> import torch
        >>> class DropExtra(FlatArgsAdapter):
        ...     def adapt(self, target_spec, input_spec, input_args, metadata=None, obj=None):
        ...         return input_args[: target_spec.num_leaves]
        >>> from lowerdeck.unflatten import unflatten
        >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
        >>> unflatten(program, DropExtra())(-torch.ones(2), "ignored")
        tensor([0., 0.])
    """

    @abstractmethod
    def adapt(
        self,
        target_spec: pytree.TreeSpec,
        input_spec: pytree.TreeSpec,
        input_args: Leaves,
        metadata: dict[str, Any] | None = None,
        obj: Any = None,
    ) -> Leaves:
        """Return one flat argument for each leaf of ``target_spec``.

        Args:
            target_spec: The exported structure of ``(args, kwargs)``.
            input_spec: The structure of this call.
            input_args: The leaves of this call; may be changed in place.
            metadata: A copy of the metadata of the exported graph module.
            obj: The unflattened positional arguments of this call.
        """

    def get_flat_arg_paths(self) -> list[str]:
        """Return a name for each leaf, for messages, or an empty list."""
        return []


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Pytree structures of one module's arguments and result.

    Some modules read values of other modules that are not arguments. The caller passes these as
    extra inputs, and receives extra outputs, in a ``PendingCall``.

    Attributes:
        in_spec: Structure of ``(args, kwargs)``.
        out_spec: Structure of the result.
        names: Parameter names of positional arguments, then of keyword arguments.
        is_variadic: Whether ``forward`` takes ``*args`` and ``**kwargs``, in which case the
            module's adapter, if any, converts other structures.
        extra_inputs: Number of extra inputs.
        extra_outputs: Number of extra outputs.
        required_inputs: Number of extra inputs that an eager replacement could not compute
            from its arguments.
        updates: Targets of the leading outputs, which are written after the graph has run: the
            attribute path of a state, or None and the index of an argument leaf.
        is_flat: Whether the call has no recorded signature: its arguments and results are tensors
            in order of use.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    names: tuple[str, ...] = ()
    is_variadic: bool = False
    extra_inputs: int = 0
    extra_outputs: int = 0
    required_inputs: int = 0
    updates: tuple[tuple[str | None, int], ...] = ()
    is_flat: bool = False

    @property
    def has_extras(self) -> bool:
        """Whether there are extra inputs or outputs."""
        return bool(self.extra_inputs or self.extra_outputs)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the parameters in order, always with ``PENDING`` at the end."""
        return (*(("args", "kwargs") if self.is_variadic else self.names), PENDING)

    @property
    def parameters(self) -> str:
        """Source of the parameter list after ``self``."""
        if self.is_variadic:
            return f", *args{f', {PENDING}' if self.has_extras else ''}, **kwargs"
        named = "".join(f", {name}" for name in self.names)
        return named + (f", *, {PENDING}" if self.has_extras else "")

    @property
    def parts(self) -> list[pytree.TreeSpec]:
        """The pytree structure of each argument."""
        return [spec for part in self.in_spec.children() for spec in part.children()]

    def leaf_parameters(self) -> Iterator[str | None]:
        """Yield the parameter of each leaf, or None for a leaf that is nested in a parameter."""
        if self.is_variadic:
            yield from (None for _ in range(self.in_spec.num_leaves + self.extra_inputs))
            return
        for name, spec in zip(self.names, self.parts, strict=True):
            yield from (name,) if spec.is_leaf() else (None for _ in range(spec.num_leaves))
        yield from (None for _ in range(self.extra_inputs))

    def labels(self) -> list[str]:
        """Return the name of each argument as the caller passes it, for error messages."""
        args, kwargs = self.in_spec.children()
        return [*self.names[: args.num_children], *(one_line(str(key)) for key in kwargs.context)]

    def leaf_labels(self, examples: Sequence[Any], write: Callable[[str], str] = str) -> list[str]:
        """Return the caller's expression for each leaf, such as ``x`` or ``options['scale']``.

        Args:
            examples: Example values of the leaves.
            write: Formats the name of an argument.
        """
        labels: list[str] = []
        for label, spec in zip(self.labels(), self.parts, strict=True):
            leaves = examples[len(labels) : len(labels) + spec.num_leaves]
            labels += [write(label) + part for part in _part_labels(spec, leaves)]
        return labels

    def flatten(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Any) -> list[Any]:
        """Return the leaves of a call.

        Raises:
            InputStructureError: The pytree structure differs from the recorded one.
        """
        if self.is_variadic:
            own = {name: value for name, value in kwargs.items() if name != PENDING}
            return adapt_arguments(module, tuple(args), own, self.in_spec)
        leaves: list[Any] = []
        for value, spec, label in zip(args, self.parts, self.labels(), strict=True):
            leaves += [value] if spec.is_leaf() else flatten_like(value, spec, label)
        return leaves

    def flatten_lines(self, leaves: Sequence[str], object_name: NameObject) -> Iterator[str]:
        """Yield lines that flatten the parameters into the variables ``leaves``."""
        feed = iter(leaves)
        if self.is_variadic:
            targets = "".join(f"{leaf}, " for leaf in islice(feed, self.in_spec.num_leaves))
            function = object_name(adapt_arguments)
            text = f"{function}(self, args, kwargs, {object_name(self.in_spec)})"
            yield f"{targets}= {text}" if targets else text
        arguments = zip(self.names, self.parts, self.labels(), strict=True)
        for name, spec, label in () if self.is_variadic else arguments:
            yield from _unpack_lines(name, spec, label, feed, object_name)
        if targets := "".join(f"{leaf}, " for leaf in feed):
            yield f"{targets}= {PENDING}.extra_inputs"

    def return_lines(self, leaves: Sequence[str], object_name: NameObject) -> Iterator[str]:
        """Yield lines that unflatten the expressions ``leaves`` and return the result."""
        feed = iter(leaves)
        result = _build_expression(self.out_spec, feed, object_name)
        if self.extra_outputs:
            yield f"{PENDING}.extra_outputs = ({''.join(leaf + ', ' for leaf in feed)})"
        yield f"return {result}"


def flat_signature(inputs: int, outputs: int) -> CallSignature:
    """Return the signature of a call that takes and returns tensors without structure."""
    in_spec = pytree.tree_structure((tuple([0] * inputs), {}))
    out_spec = pytree.tree_structure(0 if outputs == 1 else tuple([0] * outputs))
    names, _ = argument_variables(in_spec, None)
    return CallSignature(in_spec, out_spec, names, is_flat=True)


def argument_variables(
    in_spec: pytree.TreeSpec, known: Sequence[str] | None
) -> tuple[tuple[str, ...], bool]:
    """Return the parameter names, and whether all keywords can be parameter names.

    Args:
        in_spec: Structure of ``(args, kwargs)``.
        known: Parameter names of eager's forward, if export recorded them.
    """
    args, kwargs = in_spec.children()
    keywords = [str(name) for name in kwargs.context]
    taken = set(filter(_is_parameter, keywords))
    variables = [
        key if key in taken else _unused(f"keyword_{index}", taken)
        for index, key in enumerate(keywords)
    ]
    names = list(known or ())[: args.num_children]
    if (
        len(names) != args.num_children
        or len({*names, *variables}) != len(names) + len(variables)
        or not all(map(_is_parameter, names))
    ):
        names = [_unused(f"arg_{index}", taken) for index in range(args.num_children)]
    return (*names, *variables), keywords == variables


def _is_parameter(name: object) -> bool:
    return is_name(name) and name not in {"self", PENDING}


def _unused(name: str, taken: set[str]) -> str:
    """Return ``name``, suffixed with underscores if it is in ``taken``, and reserve it."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


@lru_cache(4096)
def is_name(text: object) -> bool:
    """Return whether ``text`` is an identifier that Python does not rename.

    The parser applies NFKC (``µ`` becomes ``μ``), which would read another attribute;
    ``__debug__`` cannot be assigned.
    """
    return (
        type(text) is str
        and text.isidentifier()
        and not keyword.iskeyword(text)
        and text != "__debug__"
        and (text.isascii() or unicodedata.normalize("NFKC", text) == text)
    )


def one_line(text: str) -> str:
    """Return ``text`` with line ends, invisible characters and bidirectional marks escaped."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def adapt_arguments(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, expected: pytree.TreeSpec
) -> list[Any]:
    """Return the leaves of a call, converted by the module's adapter if the structure differs.

    Args:
        kwargs: Keyword arguments, in any order.

    Raises:
        InputStructureError: The structure differs and the module has no adapter, or the adapter
            returned another number of leaves.
    """
    names = expected.child(1).context
    if kwargs and set(kwargs) == set(names):
        kwargs = {name: kwargs[name] for name in names}
    leaves, structure = pytree.tree_flatten((args, kwargs))
    if structure == expected:
        return leaves
    # Attribute access would find model state of this name.
    adapter: FlatArgsAdapter | None = module.__dict__.get(ADAPTER)
    if adapter is None:
        raise InputStructureError(
            f"The structure of the arguments differs from the exported one: found "
            f"{describe_spec(structure)}; expected {describe_spec(expected)}. Pass the exported "
            "structure, or give unflatten a flat_args_adapter."
        )
    leaves = adapter.adapt(
        target_spec=expected,
        input_spec=structure,
        input_args=leaves,
        metadata=module.__dict__["meta"],
        obj=args,
    )
    if len(leaves) != expected.num_leaves:
        raise InputStructureError(
            f"{type(adapter).__name__}.adapt returned {len(leaves)} arguments; expected "
            f"{expected.num_leaves}, one for each value of {describe_spec(expected)}."
        )
    return leaves


def flatten_like(value: Any, spec: pytree.TreeSpec, path: str) -> list[Any]:
    """Return the leaves of ``value``, which must have the structure ``spec``.

    Proxies of a symbolic trace are accepted, as is a ``torch.Size`` for a tuple.

    Args:
        path: Name of the value, for the message.

    Raises:
        InputStructureError: The structure differs.
    """
    if isinstance(value, torch.Size):
        value = tuple(value)
    leaves, structure = pytree.tree_flatten(value)
    if structure == spec:
        return leaves
    if isinstance(value, Proxy) and spec.type in {tuple, list, dict}:
        keys = spec.context if spec.type is dict else range(spec.num_children)
        items: Any = value
        parts = [(items[key], child) for key, child in zip(keys, spec.children(), strict=True)]
        return [
            leaf
            for item, child in parts
            for leaf in ([item] if child.is_leaf() else flatten_like(item, child, path))
        ]
    raise InputStructureError(
        f"{path!r} differs in structure from the recorded one: found "
        f"{describe_spec(structure)}; expected {describe_spec(spec)}. Pass the recorded "
        "structure, and return it from a replaced module."
    )


def _part_labels(spec: pytree.TreeSpec, leaves: Sequence[Any]) -> Iterator[str]:
    """Yield the expression that follows the argument's name for each leaf, such as ``[0]``."""
    try:
        example = pytree.tree_unflatten(leaves, spec)
        paths = [path for path, _ in pytree.tree_flatten_with_path(example)[0]]
    except Exception:
        # A class's constructor may raise any error for placeholder leaves.
        paths = []
    if len(paths) == len(leaves):
        yield from map(pytree.keystr, paths)
    else:
        yield from (f" (leaf {index})" for index in range(len(leaves)))


def _unpack_lines(
    text: str, spec: pytree.TreeSpec, path: str, leaves: Iterator[str], object_name: NameObject
) -> Iterator[str]:
    if spec.is_leaf():
        leaf = next(leaves)
        if leaf != text:
            yield f"{leaf} = {text}"
        return
    if spec.type not in {tuple, list, dict}:
        targets = "".join(f"{next(leaves)}, " for _ in range(spec.num_leaves))
        call = f"{object_name(flatten_like)}({text}, {object_name(spec)}, {path!r})"
        yield f"{targets}= {call}" if targets else call
        return
    keys = spec.context if spec.type is dict else range(spec.num_children)
    for key, child in zip(keys, spec.children(), strict=True):
        # Keys of other types become named globals.
        shown = repr(key) if type(key) in {str, int} else object_name(key)
        yield from _unpack_lines(
            f"{text}[{shown}]", child, f"{path}[{key!r}]", leaves, object_name
        )


def _build_expression(
    spec: pytree.TreeSpec, leaves: Iterator[str], object_name: NameObject
) -> str:
    if spec.is_leaf():
        return next(leaves)
    if spec.type not in {tuple, list, dict}:
        text = ", ".join(next(leaves) for _ in range(spec.num_leaves))
        return f"{object_name(pytree.tree_unflatten)}([{text}], {object_name(spec)})"
    parts = [_build_expression(child, leaves, object_name) for child in spec.children()]
    keys = spec.context if spec.type is dict else ()
    shown = [repr(key) if type(key) in {str, int} else object_name(key) for key in keys]
    return container_text(spec.type, parts, shown)


def describe_spec(spec: pytree.TreeSpec) -> str:
    """Return a structure as Python text, such as ``[a value, {'mask': a value}]``."""
    if spec.is_leaf():
        return "a value"
    parts = [describe_spec(child) for child in spec.children()]
    if spec.type in {tuple, list, dict}:
        return container_text(spec.type, parts, map(repr, spec.context or ()))
    return f"{getattr(spec.type, '__name__', spec.type)}({', '.join(parts)})"


def container_text(kind: object, parts: Sequence[str], keys: Iterable[str] = ()) -> str:
    """Return the Python source of a tuple, list or dict.

    Args:
        kind: ``tuple``, ``list`` or ``dict``.
        keys: Source of each key of a dict.
    """
    if kind is dict:
        return f"{{{', '.join(f'{key}: {part}' for key, part in zip(keys, parts, strict=True))}}}"
    text = ", ".join(parts)
    if kind is tuple:
        return f"({text},)" if len(parts) == 1 else f"({text})"
    return f"[{text}]"
