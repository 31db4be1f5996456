"""Python source for the graph of one module, and the function that it defines."""

from __future__ import annotations

import linecache
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from uuid import uuid4

import torch
from torch.fx import Graph, Node

from lowerdeck.torch_base import HigherOrderOperator, OpOverload, pytree, source_frames
from lowerdeck.unflatten._torch_private import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    SET_GRAD_MODE,
    packet_name,
)
from lowerdeck.unflatten.calls.carrying import CARRIED, CARRIES, NEEDS, PRIVATE, is_itself
from lowerdeck.unflatten.calls.checked_calls import Expected, Pattern, check_lines
from lowerdeck.unflatten.calls.chosen_forms import carrying_form, form_of
from lowerdeck.unflatten.calls.python_names import is_name
from lowerdeck.unflatten.calls.signature import CallSignature, flatten_like
from lowerdeck.unflatten.code.bindings import METHODS, callable_for
from lowerdeck.unflatten.code.call_targets import is_reserved, lookup, split_call_target
from lowerdeck.unflatten.code.check import Check
from lowerdeck.unflatten.code.failures import (
    FILE_PREFIX,
    NAME_SOURCE,
    TORCH_FOLDER,
    name_source,
    naming,
    told,
)
from lowerdeck.unflatten.sizes.checks import must_be_sizes

_TAKES_PARTS = (operator.getitem, flatten_like)
_SERIAL = re.compile(r"(_\d+)+$")
_WORD = re.compile(r"[^0-9a-zA-Z_]+")
_FILE_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one ``forward``.

    Two graphs with equal ``key`` compute the same from the same arguments and children.

    Attributes:
        lines: The lines of the function, without comments.
        comments: For each line the model's own source line, or an empty string.
        names: The objects that the lines name.
        checks: Which lines check what a call is given.
        prefix: What the names begin with of the objects that these compare with.
        key: What tells two functions apart: their lines and the objects in them by identity. What
            they check is no part of it.
    """

    lines: tuple[str, ...]
    comments: tuple[str, ...]
    names: Mapping[str, object]
    checks: range = range(0)
    prefix: str = ""
    key: tuple[object, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        objects = ((name, *_object_key(value)) for name, value in self.names.items())
        first, past = self.checks.start, self.checks.stop
        lines = (*self.lines[:first], *self.lines[past:]) if self.checks else self.lines
        object.__setattr__(self, "key", (lines, *objects))

    @property
    def text(self) -> str:
        """The source with the model's own lines as comments."""
        return "".join(
            f"{line}  # {comment}\n" if comment else f"{line}\n"
            for line, comment in zip(self.lines, self.comments, strict=True)
        )

    def digest(self) -> str:
        """Return what tells this source from all others, the same in every process if it can be.

        An object that nothing spells is told apart by a number that nobody else has.
        """
        told = [(name, _spelled(value)) for name, value in self.names.items()]
        return sha256(repr((self.lines, told)).encode()).hexdigest()[:32]

    def compile(self) -> FunctionType:
        """Return the function; a traceback through it shows its lines and the model's."""
        file = f"{FILE_PREFIX}{next(_FILE_NUMBERS)}>"
        # From text at once: a tree of Python objects takes four times as long.
        text = naming(self.text)
        # No __name__: a compiler would look for these names in the module of that name.
        scope: dict[str, Any] = dict(self.names)
        scope[NAME_SOURCE] = name_source
        exec(compile(text, file, "exec"), scope)
        # A None time keeps the entry: linecache cannot look for a file that does not exist.
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        function = scope["forward"]
        if not isinstance(function, FunctionType):
            raise TypeError(f"the source defines {function!r} instead of a function named forward")
        return function

    def bind(self, function: FunctionType, expected: Expected) -> Callable[..., Any]:
        """Return a function of this source that checks its calls.

        Args:
            function: What ``compile`` returned.
            expected: What they may be given.
        """
        if not self.checks:
            return function
        scope = {**function.__globals__, **expected.names(self.prefix)}
        bound = FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        bound.__kwdefaults__ = function.__kwdefaults__
        return bound


class Itself:
    """An object as a key: equal to itself alone, and kept alive so that no other gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _object_key(value: object) -> tuple[object, ...]:
    if isinstance(value, torch.fx.GraphModule):
        return ("graph module", *_graph_key(value))
    if isinstance(value, _SPELLED):
        # By its text: no NaN equals another one.
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return (Itself(value),)
    return (type(value), value)


def _spelled(value: object) -> object:
    if isinstance(value, torch.fx.GraphModule):
        return [(part, _spelled(whole)) for part, whole in _parts(value)]
    if isinstance(value, Source):
        return value.digest()
    plain = (type(None), bool, int, str, tuple, frozenset, pytree.TreeSpec)
    if isinstance(value, (*_SPELLED, *plain)):
        return f"{type(value).__name__} {_ordered(value)}"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return str(value)
    return uuid4().hex


def _parts(module: torch.fx.GraphModule) -> Iterator[tuple[str, object]]:
    held = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    children = {name: child for name, child in module.named_modules() if name in held}
    yield "", write_source(module.graph, None, children)
    for name in sorted(held.difference(children)):
        yield name, attrgetter(name)(module)


def _ordered(value: object) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _graph_key(module: torch.fx.GraphModule) -> Iterator[object]:
    """Yield what tells two bodies of operators apart, whatever names export gave their nodes."""
    for name, part in _parts(module):
        yield part.key if isinstance(part, Source) else (name, Itself(part))


def write_source(
    graph: Graph,
    signature: CallSignature | None = None,
    attributes: Mapping[str, object] | None = None,
    pattern: Pattern = (),
    results: Mapping[Node, Check] | None = None,
    state: Callable[..., None] | None = None,
) -> Source:
    """Return the source of a function that computes what ``graph`` does.

    Args:
        graph: The graph of one module.
        signature: How arguments and result are structured; without it they are flat.
        attributes: Graph modules that ``get_attr`` nodes name, for operators that take them.
        pattern: What calls are checked for; nothing if the graph takes fewer values.
        results: What is checked of what calls return.
        state: What checks the state that it reads.
    """
    return _Writer(graph, signature, attributes or {}, pattern, results or {}, state).write()


class _Writer:
    def __init__(
        self,
        graph: Graph,
        signature: CallSignature | None,
        attributes: Mapping[str, object],
        pattern: Pattern,
        results: Mapping[Node, Check],
        state: Callable[..., None] | None,
    ) -> None:
        self.graph = graph
        self.results = results
        self.state = state
        self.signature = signature
        self.attributes = attributes
        self.pattern = pattern
        self.checks = range(0)
        self.prefix = "_recorded"
        self.lines: list[str] = []
        self.comments: list[str] = []
        self.names: dict[str, object] = {}
        self.parameters: set[str] = set()
        self.by_object: dict[object, str] = {}
        self.local: dict[Node, str] = {}
        self.bases: dict[Node, str] = {}
        self.used: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.taken: set[str] = set(_PYTHON_NAMES)
        self.leaves: list[str] = []
        self.unread: set[Node] = set()
        self.indent = "    "

    def write(self) -> Source:
        nodes = self._read_nodes()
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self._open(placeholders)
        if self.state is not None:
            self.line(f"{self.object_name(self.state, 'check_state')}(self)")
        dead = self._last_uses(nodes)
        for node in nodes:
            if node.op not in {"placeholder", "output"}:
                self._node(node, dead.get(node, ()))
        output = next((node for node in reversed(nodes) if node.op == "output"), None)
        if output is not None:
            self._close(output)
        return Source(
            tuple(self.lines), tuple(self.comments), self.names, self.checks, self.prefix
        )

    def _read_nodes(self) -> list[Node]:
        """Return the nodes without what takes parts of results that nobody reads or checks."""
        nodes: list[Node] = []
        for node in reversed(self.graph.nodes):
            is_part = node.op == "call_function" and node.target in _TAKES_PARTS
            if is_part and node not in self.results and self.unread.issuperset(node.users):
                self.unread.add(node)
            else:
                nodes.append(node)
        return nodes[::-1]

    def _open(self, placeholders: Sequence[Node]) -> None:
        if self.signature is None:
            for node in placeholders:
                self._name(node, "x")
            parameters = "".join(f", {self.local[node]}" for node in placeholders)
            self.line(
                f"def forward(self{parameters}, /):" if parameters else "def forward(self):",
                outer=True,
            )
            self._check([self.local[node] for node in placeholders])
            return
        self.taken.update(self.signature.parameter_names)
        self.parameters.update(self.signature.parameter_names)
        for node, parameter in zip(placeholders, self.signature.leaf_parameters(), strict=True):
            if parameter is None:
                self._name(node)
            else:
                self.local[node] = parameter
        self.line(f"def forward(self{self.signature.parameters}):", outer=True)
        self.leaves = [self.local[node] for node in placeholders]
        for text in self.signature.flatten_lines(self.leaves, self.object_name):
            self.line(text)
        self._check(self.leaves)

    def _check(self, leaves: Sequence[str]) -> None:
        if len(self.pattern) > len(leaves):
            return
        while any(name.startswith(self.prefix) for name in (*self.parameters, *self.names)):
            self.prefix += "_"
        first = len(self.lines)
        for text in check_lines(self.pattern, leaves[: len(self.pattern)], self.prefix):
            self.line(text)
        self.checks = range(first, len(self.lines))

    def _close(self, output: Node) -> None:
        value = output.args[0]
        if self.signature is None:
            self.line(f"return {self.argument(value)}")
            return
        leaves = list(value) if isinstance(value, (tuple, list)) else [value]
        texts = [self.argument(leaf) for leaf in leaves]
        for path, leaf in self.signature.updates:
            target = self.leaves[leaf] if path is None else self.attribute(path)
            self.line(f"{target}.copy_({texts.pop(0)})")
        for line in self.signature.return_lines(texts, self.object_name):
            self.line(line)

    def _last_uses(self, nodes: Sequence[Node]) -> dict[Node, list[Node]]:
        """Return for each node the values that nobody reads after it."""
        seen: set[Node] = set()
        dead: dict[Node, list[Node]] = {}
        named = {node.name: node for node in nodes} if self.results else {}
        for node in reversed(nodes):
            check = self.results.get(node)
            compared = [named[name] for name in check.names()] if check is not None else []
            inputs = (*node.all_input_nodes, *compared)
            for source in () if is_itself(node) else map(_origin, inputs):
                if source not in seen:
                    seen.add(source)
                    if node.op != "output" and source.op not in {"placeholder", "get_attr"}:
                        dead.setdefault(node, []).append(source)
        return dead

    def _node(self, node: Node, dead: Sequence[Node]) -> None:
        if node.op == "get_attr":
            text = self.attribute(str(node.target))
            if len(node.users) == 1:
                # Read where it is used: one name less.
                self.local[node] = text
                return
            self.line(f"{self._name(node)} = {text}")
            return
        if node.op == "call_function" and self._mode(node):
            return
        if is_itself(node):
            # The tensor itself, by the name that it has.
            self.local[node] = self.local[_origin(node)]
            return
        text = self._call(node)
        check = self.results.get(node)
        if check is not None:
            self._checked(node, check, text, dead)
            return
        if not self.unread.issuperset(node.users):
            text = f"{self._name(node, heir_of=dead)} = {text}"
        if left := self._freed(node, dead):
            text += f"; {left}"
        self.line(text, _source_comment(node))

    def _checked(self, node: Node, check: Check, text: str, dead: Sequence[Node]) -> None:
        # Its name is no other's, and nothing is freed, before it was compared with what is dead.
        self.line(f"{self._name(node)} = {text}", _source_comment(node))
        names = {each.name: name for each, name in self.local.items()}
        values = ["self", self.local[node], *(text.format(**names) for text in check.texts)]
        text = f"{self.object_name(check.check, 'check_result')}({', '.join(values)})"
        if left := self._freed(node, dead):
            text += f"; {left}"
        self.line(text)

    def _freed(self, node: Node, dead: Sequence[Node]) -> str:
        """Return the statement that frees what nobody reads after a node; "" if nothing is."""
        left = [
            self.local[source] for source in dead if self.local[source] != self.local.get(node)
        ]
        return f"{' = '.join(left)} = None" if left else ""

    def _mode(self, node: Node) -> bool:
        """Open or close a block for a node that changes a mode; return whether it was one."""
        if node.target is SET_GRAD_MODE or node.target is ENTER_AUTOCAST:
            if "closes" in node.meta:
                self._close_block()
                return True
            manager = torch.set_grad_enabled if node.target is SET_GRAD_MODE else torch.autocast
            arguments = self.arguments(node.args, {})
            if node.target is ENTER_AUTOCAST:
                device, dtype, enabled, cache = (self.argument(value) for value in node.args)
                arguments = f"{device}, dtype={dtype}, enabled={enabled}, cache_enabled={cache}"
            self.line(f"with {self.object_name(manager)}({arguments}):", _source_comment(node))
            self.indent += "    "
            return True
        if node.target is EXIT_AUTOCAST:
            self._close_block()
            return True
        return False

    def _close_block(self) -> None:
        # Regions that touch each other leave empty ones between them.
        if self.lines[-1].endswith(":"):
            self.line("pass")
        self.indent = self.indent[:-4]

    def _call(self, node: Node) -> str:
        if node.op == "call_function":
            if node.target is operator.getitem:
                value, key = node.args
                return f"{self.argument(value)}[{self.argument(key)}]"
            if node.target in METHODS and node.args and not node.kwargs:
                value, *rest = node.args
                return f"{self.argument(value)}.{METHODS[node.target]}({self.arguments(rest, {})})"
            function = self.object_name(callable_for(node.target, node.kwargs))
            arguments = self.arguments(node.args, node.kwargs)
            if node.target is must_be_sizes:
                arguments += f", self.{PRIVATE}.unchecked"
            return f"{function}({arguments})"
        if node.op == "call_module":
            return self._call_child(node)
        if node.op == "call_method":
            value, *rest = node.args
            method = str(node.target)
            owner = self.argument(value)
            found = (
                f"{owner}.{method}"
                if is_name(method)
                else f"{self.object_name(getattr)}({owner}, {method!r})"
            )
            return f"{found}({self.arguments(rest, node.kwargs)})"
        raise TypeError(f"a graph cannot hold a node of kind {node.op!r}")

    def _call_child(self, node: Node) -> str:
        path, form = split_call_target(str(node.target))
        kwargs = dict(node.kwargs)
        called = module = self.attribute(path, is_module=True)
        if CARRIED in kwargs:
            values = self.argument(kwargs.pop(CARRIED))
            told = f"{path!r}, {form or 0}, {values}, {node.meta.get(CARRIES, ())!r}"
            if needs := node.meta.get(NEEDS):
                told += f", {needs}"
            called = f"{self.object_name(carrying_form)}(self, {module}, {told})"
        elif form is not None:
            called = f"{self.object_name(form_of)}(self, {module}, {path!r}, {form})"
        return f"{called}({self.arguments(node.args, kwargs)})"

    def attribute(self, path: str, *, is_module: bool = False) -> str:
        """Return the expression that reads an attribute of this module."""
        if path in self.attributes:
            return self.object_name(self.attributes[path], _SERIAL.sub("", path))
        text = "self"
        parts = path.split(".")
        for index, part in enumerate(parts):
            if is_module and index == 0:
                # Not by name, which asks for parameters and buffers first: a third of what the
                # call of a module costs. Deeper ones may be in a wrapper that hands names on.
                text = f"{text}._modules[{part!r}]"
            elif (is_module or index < len(parts) - 1) and not is_name(part):
                # As torch's containers do it; compilers know the name of what is read so.
                text = f"{text}._modules[{part!r}]"
            elif is_reserved(part):
                text = f"{self.object_name(lookup)}({text}, {part!r})"
            elif is_name(part):
                text = f"{text}.{part}"
            else:
                text = f"{self.object_name(getattr)}({text}, {part!r})"
        return text

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the text between the parentheses of a call."""
        texts = [self.argument(value) for value in args]
        if all(is_name(name) for name in kwargs):
            texts += [f"{name}={self.argument(value)}" for name, value in kwargs.items()]
        else:
            pairs = ", ".join(
                f"{name!r}: {self.argument(value)}" for name, value in kwargs.items()
            )
            texts.append(f"**{{{pairs}}}")
        return ", ".join(texts)

    def argument(self, value: Any) -> str:
        """Return the expression for one argument."""
        if isinstance(value, Node):
            return self.local[value]
        if value is None or (isinstance(value, (bool, int, str)) and type(value) in _LITERALS):
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else self.object_name(value)
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return f"({''.join(self.argument(item) + ', ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self.argument(item) for item in value)}]"
        if isinstance(value, dict):
            pairs = (f"{self.argument(key)}: {self.argument(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
        if isinstance(value, slice):
            parts = ", ".join(
                self.argument(part) for part in (value.start, value.stop, value.step)
            )
            return f"{self.object_name(slice)}({parts})"
        return self.object_name(value)

    def object_name(self, value: object, hint: str = "") -> str:
        """Return the global name by which the function knows an object."""
        # Devices and such are equal where they are not one object.
        key = (type(value), repr(value)) if isinstance(value, _SPELLED) else id(value)
        found = self.by_object.get(key)
        if found is None:
            words = hint or getattr(value, "__name__", None) or _words(value)
            if _PYTHON_NAMES.get(str(words)) is value and words not in self.parameters:
                return str(words)
            base = "_" + _WORD.sub("_", str(words)).strip("_")[:40]
            found, number = base, self.numbers.get(base, 1)
            while self._is_taken(found):
                found, number = f"{base}_{number}", number + 1
            self.numbers[base] = number
            self.by_object[key] = found
            self.names[found] = value
        return found

    def _is_taken(self, name: str) -> bool:
        return (
            name in self.names
            or name in self.parameters
            or (bool(self.checks) and name.startswith(self.prefix))
        )

    def _name(self, node: Node, base: str = "", *, heir_of: Sequence[Node] = ()) -> str:
        # Names of what is computed, not of the flat graph's nodes: equal modules get equal source.
        base = base or self._base(node)
        self.bases[node] = base
        for source in heir_of:
            if self.bases.get(source) == base:
                # One variable for a chain of like steps, as a person would write it.
                name = self.local[node] = self.local[source]
                return name
        number = self.used.get(base, 0)
        name = f"{base}_{number}" if number else base
        while name in self.taken or not is_name(name):
            number += 1
            name = f"{base}_{number}"
        self.used[base] = number + 1
        self.taken.add(name)
        self.local[node] = name
        return name

    def _base(self, node: Node) -> str:
        base = _SERIAL.sub("", _WORD.sub("_", _base_name(node))).lstrip("_") or "value"
        if base[0].isdigit():
            return "value" if base.isdigit() else f"value_{base}"
        return base

    def line(self, text: str, comment: str = "", *, outer: bool = False) -> None:
        """Add a line at the current depth."""
        self.lines.append(text if outer else self.indent + text)
        self.comments.append(comment)


def _origin(node: Node) -> Node:
    """Return what ``node`` is an alias of that stands for the tensor itself; else ``node``."""
    while is_itself(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _words(value: object) -> str:
    """Return what to call an object: the same in every process, so no addresses, no hashes."""
    return str(value) if isinstance(value, _SPELLED) else type(value).__name__


def _base_name(node: Node) -> str:
    if node.op in {"call_module", "get_attr"}:
        path, _ = split_call_target(str(node.target))
        return path.rpartition(".")[2]
    if node.op == "placeholder":
        return node.name
    return str(packet_name(node.target) or getattr(node.target, "__name__", str(node.target)))


_SPELLED = (float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
_LITERALS = {bool, int, str}
_PYTHON_NAMES: dict[str, object] = {
    "self": None,
    **{found.__name__: found for found in (getattr, slice, type, len, tuple, list, dict)},
}
"""What generated code names of Python's own, unless a parameter has that name."""


def _source_comment(node: Node) -> str:
    """Return ``file:line in function: code`` of the node's innermost frame, on one line.

    The innermost one of a call is in what it calls: where that is a layer of torch's, the one that
    calls it is shown.
    """
    frames = source_frames(node)
    if not frames:
        return ""
    if node.op == "call_module" and frames[-1].file.startswith(TORCH_FOLDER):
        own = (one for one in reversed(frames) if not one.file.startswith(TORCH_FOLDER))
        return told(next(own, frames[-1]))
    return told(frames[-1])
