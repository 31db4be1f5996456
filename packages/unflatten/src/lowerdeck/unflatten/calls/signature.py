"""How a call's arguments and result are structured, and the code that takes them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Proxy

from lowerdeck.torch_base import pytree
from lowerdeck.unflatten.calls.adapting import adapted_arguments
from lowerdeck.unflatten.calls.channel import take_told
from lowerdeck.unflatten.calls.input_constraints import InputConstraints
from lowerdeck.unflatten.calls.python_names import is_name, on_one_line
from lowerdeck.unflatten.errors import InputStructureError

_TOLD = "_told"
"""Variable of what the caller tells beside the arguments."""

_OTHERS = "_others"
"""Parameter that takes the arguments whose keywords Python cannot spell."""

NameObject = Callable[[object], str]
"""Returns the global name under which generated code finds an object."""


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The structure of one module's arguments and result.

    Attributes:
        in_spec: Structure of ``(args, kwargs)``.
        out_spec: Structure of the result.
        names: The variables of the positional arguments, then of the keyword ones.
        others: Keyword and variable of each argument whose keyword Python cannot spell.
        adapts: Take any arguments and let the module's adapter turn them into the exported ones.
        constraints: What each leaf has to satisfy; None where nothing is checked.
        carried: Number of values taken beside the arguments.
        carries: Number of values returned beside the result.
        needs: Number of the values taken that other modules compute, which eager's would not see.
        updates: What the first outputs of the graph are to overwrite after it has run: the
            attribute path of some state, or None and the number of an argument's leaf.
        flat: Whether this is no signature of eager's: tensors are taken as they are used.
        loses_writes: Whether eager's writes an argument in place, and this does not.
    """

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    names: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    adapts: bool = False
    constraints: InputConstraints | None = None
    carried: int = 0
    carries: int = 0
    needs: int = 0
    updates: tuple[tuple[str | None, int], ...] = ()
    flat: bool = False
    loses_writes: bool = False

    @property
    def is_told(self) -> bool:
        """Whether values pass beside the arguments and the result."""
        return bool(self.carried or self.carries)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The parameters of the function, in order."""
        return ("args", "kwargs") if self.adapts else (*self.names, _TOLD, _OTHERS)

    @property
    def parameters(self) -> str:
        """The text of the parameter list after ``self``."""
        if self.adapts:
            return ", *args, **kwargs"
        hidden = {variable for _, variable in self.others}
        named = "".join(f", {name}" for name in self.names if name not in hidden)
        return named + (f", **{_OTHERS}" if self.others else "")

    def leaf_parameters(self) -> Iterator[str | None]:
        """Yield for each leaf the parameter that it is, or None where it is a part of one."""
        if self.adapts:
            yield from (None for _ in range(self.in_spec.num_leaves))
            return
        args, kwargs = self.in_spec.children()
        for name, spec in zip(self.names, [*args.children(), *kwargs.children()], strict=True):
            yield from (name,) if spec.is_leaf() else (None for _ in range(spec.num_leaves))
        yield from (None for _ in range(self.carried))

    def flatten_lines(self, leaves: Sequence[str], object_name: NameObject) -> Iterator[str]:
        """Yield the lines that set the variables ``leaves`` from the parameters."""
        if self.adapts:
            targets = "".join(f"{leaf}, " for leaf in leaves)
            taken = object_name(adapted_arguments)
            text = f"{taken}(self, args, kwargs, {object_name(self.in_spec)})"
            yield f"{targets}= {text}" if leaves else text
        else:
            if self.others:
                variables = "".join(f"{variable}, " for _, variable in self.others)
                keys = tuple(key for key, _ in self.others)
                yield f"{variables}= {object_name(take_others)}({_OTHERS}, {keys!r})"
            feed = iter(leaves)
            specs = [spec for part in self.in_spec.children() for spec in part.children()]
            labels = argument_labels(self.in_spec, self.names)
            for name, spec, label in zip(self.names, specs, labels, strict=True):
                yield from _take_apart(name, spec, label, feed, object_name)
            if self.is_told:
                yield f"{_TOLD} = {object_name(take_told)}({self.carried}, {self.carries})"
                targets = "".join(f"{leaf}, " for leaf in feed)
                if targets:
                    yield f"{targets}= {_TOLD}.given"
        if self.constraints is not None:
            check = object_name(self.constraints.check)
            fixed = object_name(self.constraints.check_fixed)
            compiling = object_name(torch.compiler.is_compiling)
            yield f"({fixed} if {compiling}() else {check})({', '.join(['self', *leaves])})"

    def return_lines(self, leaves: Sequence[str], object_name: NameObject) -> Iterator[str]:
        """Yield the lines that return the result made of the expressions ``leaves``."""
        feed = iter(leaves)
        result = _put_together(self.out_spec, feed, object_name)
        if self.carries:
            yield f"{_TOLD}.back = ({''.join(leaf + ', ' for leaf in feed)})"
        yield f"return {result}"


def named_arguments(
    in_spec: pytree.TreeSpec, known: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return ``names`` and ``others`` of a ``CallSignature``.

    Args:
        in_spec: Structure of ``(args, kwargs)``.
        known: The names in eager's signature, where export recorded them.
    """
    args, kwargs = in_spec.children()
    keywords = [str(name) for name in kwargs.context]
    taken = set(filter(_is_parameter, keywords))
    variables = [
        key if key in taken else _free(f"keyword_{index}", taken)
        for index, key in enumerate(keywords)
    ]
    wanted = list(known or ())[: args.num_children]
    if (
        len(wanted) != args.num_children
        or len({*wanted, *variables}) != len(wanted) + len(variables)
        or not all(map(_is_parameter, wanted))
    ):
        wanted = [_free(f"arg_{index}", taken) for index in range(args.num_children)]
    others = tuple(
        (key, variable)
        for key, variable in zip(keywords, variables, strict=True)
        if key != variable
    )
    return (*wanted, *variables), others


def argument_labels(in_spec: pytree.TreeSpec, names: Sequence[str]) -> list[str]:
    """Return for each argument the name by which a caller knows it, for messages."""
    args, kwargs = in_spec.children()
    return [*names[: args.num_children], *(on_one_line(str(key)) for key in kwargs.context)]


def take_others(found: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the arguments of these keywords.

    Raises:
        InputStructureError: One is missing, or there is another one.
    """
    if not isinstance(found, Proxy) and found.keys() != frozenset(keys):
        raise InputStructureError(
            f"expected the keyword arguments {list(keys)} beside those that have a name in "
            f"Python; found {list(found)}. Pass them as **{{{keys[0]!r}: value}}."
        )
    return tuple(found[key] for key in keys)


def _is_parameter(name: object) -> bool:
    return is_name(name) and name not in {"self", _TOLD, _OTHERS}


def _free(wanted: str, taken: set[str]) -> str:
    """Return ``wanted``, or with underscores after it; note that it is taken."""
    while wanted in taken:
        wanted += "_"
    taken.add(wanted)
    return wanted


def check_structure(path: str, value: object, spec: pytree.TreeSpec) -> None:
    """Refuse an argument whose containers are not those of ``spec``.

    A proxy of a symbolic trace passes: parts are taken out of it as eager's code does. So does
    the size of a tensor, which export records as a tuple.

    Raises:
        InputStructureError: It is neither.
    """
    if isinstance(value, torch.Size) and spec.type is tuple and len(value) == spec.num_children:
        return
    if not isinstance(value, Proxy):
        raise structure_error(path, value, spec)


def structure_error(path: str, value: object, spec: pytree.TreeSpec) -> InputStructureError:
    """Return the error for an argument whose containers are not those of ``spec``."""
    if isinstance(value, Proxy):
        return InputStructureError(
            f"Argument {path!r} is a Proxy of a symbolic trace; expected "
            f"{_describe_spec(spec)}, which cannot be taken apart without its values. Give one "
            "with torch.fx.PH for each leaf in concrete_args."
        )
    return InputStructureError(
        f"Argument {path!r} has another structure than the program was exported with: found "
        f"{_describe(value)}, expected {_describe_spec(spec)}. Pass the exported structure, or "
        "give unflatten a flat_args_adapter."
    )


def flatten_like(value: Any, spec: pytree.TreeSpec, path: str) -> list[Any]:
    """Return the leaves of ``value``, which must have exactly the structure ``spec``.

    Raises:
        InputStructureError: It has another one.
    """
    leaves, found = pytree.tree_flatten(value)
    if found != spec:
        raise structure_error(path, value, spec)
    return leaves


def _take_apart(
    text: str, spec: pytree.TreeSpec, path: str, leaves: Iterator[str], object_name: NameObject
) -> Iterator[str]:
    if spec.is_leaf():
        leaf = next(leaves)
        if leaf != text:
            yield f"{leaf} = {text}"
        return
    children = spec.children()
    if spec.type not in {tuple, list, dict}:
        targets = "".join(f"{next(leaves)}, " for _ in range(spec.num_leaves))
        call = f"{object_name(flatten_like)}({text}, {object_name(spec)}, {path!r})"
        yield f"{targets}= {call}" if targets else call
        return
    is_dict = spec.type is dict
    if is_dict:
        wrong = f"{text}.keys() != {object_name(frozenset(spec.context))}"
    else:
        wrong = f"{object_name(len)}({text}) != {len(children)}"
    is_other = f"{object_name(type)}({text}) is not {object_name(spec.type)}"
    yield f"if {is_other} or {wrong}:"
    yield f"    {object_name(check_structure)}({path!r}, {text}, {object_name(spec)})"
    keys = list(spec.context) if is_dict else list(range(len(children)))
    for key, child in zip(keys, children, strict=True):
        # Keys of other types than these are named as objects.
        shown = repr(key) if type(key) in {str, int} else object_name(key)
        yield from _take_apart(f"{text}[{shown}]", child, f"{path}[{key!r}]", leaves, object_name)


def _put_together(spec: pytree.TreeSpec, leaves: Iterator[str], object_name: NameObject) -> str:
    if spec.is_leaf():
        return next(leaves)
    if spec.type not in {tuple, list, dict}:
        texts = ", ".join(next(leaves) for _ in range(spec.num_leaves))
        return f"{object_name(pytree.tree_unflatten)}([{texts}], {object_name(spec)})"
    texts_of = [_put_together(child, leaves, object_name) for child in spec.children()]
    if spec.type is tuple:
        return f"({''.join(text + ', ' for text in texts_of)})"
    if spec.type is list:
        return f"[{', '.join(texts_of)}]"
    keys = [repr(key) if type(key) in {str, int} else object_name(key) for key in spec.context]
    return f"{{{', '.join(f'{key}: {text}' for key, text in zip(keys, texts_of, strict=True))}}}"


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return f"{type(value).__name__} with keys {list(value)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _describe_spec(spec: pytree.TreeSpec) -> str:
    name = getattr(spec.type, "__name__", str(spec.type))
    if spec.type is dict:
        return f"dict with keys {list(spec.context)}"
    return f"{name} of {spec.num_children}"
