"""Generate Python source from one module's graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, Node

from lowerdeck.torch_base import SourceFrame, source_frames
from lowerdeck.unflatten._torch_private import ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD_MODE
from lowerdeck.unflatten.call_signature import CallSignature, container_text, flatten_like, is_name
from lowerdeck.unflatten.codegen.functions import TORCH_FOLDER, location
from lowerdeck.unflatten.codegen.names import (
    BY_TEXT,
    METHODS,
    RESERVED_NAMES,
    SERIAL,
    Names,
    callable_for,
    inner_child,
    lookup,
    split_call_target,
)
from lowerdeck.unflatten.cut.graphs import EXTRA_INPUTS, EXTRA_OUTPUTS, SITE
from lowerdeck.unflatten.metadata import UNCHANGED, is_pass_through
from lowerdeck.unflatten.specializations import (
    DIRECT,
    RUN,
    call_specialization,
    check_strict_export,
    enter,
    is_strict_export,
    start,
)

_LITERALS = {bool, int, str}


@dataclass(frozen=True, slots=True)
class Source:
    """The source of one ``forward``.

    Attributes:
        lines: Lines of the function, without comments.
        comments: The model's source line of each line, or "".
        names: Globals of the lines.
        key: Key that is equal for equivalent functions of the same arguments and children.
    """

    lines: tuple[str, ...]
    comments: tuple[str, ...]
    names: Mapping[str, object]
    key: tuple[object, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        objects = [(name, *_object_key(value)) for name, value in self.names.items()]
        object.__setattr__(self, "key", (self.lines, *objects))

    @property
    def text(self) -> str:
        """Source with the model's lines as comments."""
        return "".join(
            f"{line}  # {comment}\n" if comment else f"{line}\n"
            for line, comment in zip(self.lines, self.comments, strict=True)
        )

    @property
    def parameters(self) -> str:
        """The text of the parameter list after ``self``."""
        return self.lines[0].removeprefix("def forward(self").removesuffix("):")


class Identity:
    """Identity key of an object; keeps it alive so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _object_key(value: object) -> tuple[object, ...]:
    if isinstance(value, torch.fx.GraphModule):
        return ("graph module", *_graph_key(value))
    if isinstance(value, BY_TEXT):
        # As text, because NaN is not equal to itself.
        return (type(value), repr(value))
    try:
        hash(value)
    except TypeError:
        return (Identity(value),)
    return (type(value), value)


def _graph_key(module: torch.fx.GraphModule) -> Iterator[object]:
    """Yield a key of a branch or loop body that ignores node names."""
    names = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    children = {name: child for name, child in module.named_modules() if name in names}
    yield write_source(module.graph, attributes=children).key
    for name in sorted(names.difference(children)):
        yield (name, Identity(attrgetter(name)(module)))


def write_source(
    graph: Graph,
    signature: CallSignature | None = None,
    attributes: Mapping[str, object] | None = None,
    *,
    is_checked: bool = False,
    is_root: bool = False,
) -> Source:
    """Return the source of a function that computes ``graph``.

    Args:
        signature: Structure of arguments and result; None if flat.
        attributes: Subgraphs of higher-order operators, by ``get_attr`` target.
        is_checked: Check the arguments unless an unchanged parent calls the function.
        is_root: Check the arguments also while strict export traces the function.
    """
    writer = _Writer(graph, signature, attributes or {}, is_checked=is_checked, is_root=is_root)
    return writer.write()


class _Writer(Names):
    def __init__(
        self,
        graph: Graph,
        signature: CallSignature | None,
        attributes: Mapping[str, object],
        *,
        is_checked: bool,
        is_root: bool,
    ) -> None:
        super().__init__()
        self.graph = graph
        self.signature = signature
        self.attributes = attributes
        self.is_checked = is_checked
        self.is_root = is_root
        self.lines: list[str] = []
        self.comments: list[str] = []
        self.leaves: list[str] = []
        self.unread: set[Node] = set()
        self.callee = self.mode = ""
        self.indent = "    "

    def write(self) -> Source:
        nodes = self._read_nodes()
        self._open([node for node in nodes if node.op == "placeholder"])
        dead = self._last_uses(nodes)
        for node in nodes:
            if node.op not in {"placeholder", "output"}:
                self._node(node, dead.get(node, ()))
        output = next((node for node in reversed(nodes) if node.op == "output"), None)
        if output is not None:
            self._close(output)
        return Source(tuple(self.lines), tuple(self.comments), self.names)

    def _read_nodes(self) -> list[Node]:
        """Return the nodes, except those that unpack unused elements of results."""
        nodes: list[Node] = []
        for node in reversed(self.graph.nodes):
            if _unpacks(node) and self.unread.issuperset(node.users):
                self.unread.add(node)
            else:
                nodes.append(node)
        return nodes[::-1]

    def _open(self, placeholders: Sequence[Node]) -> None:
        signature = self.signature
        if signature is None:
            for node in placeholders:
                self.bind(node, "x")
            parameters = "".join(f", {self.local[node]}" for node in placeholders)
            self.line(
                f"def forward(self{parameters}, /):" if parameters else "def forward(self):",
                outer=True,
            )
            self._check_entry(f"self{parameters}", is_alone=True)
            return
        self.taken.update(signature.parameter_names)
        self.parameters.update(signature.parameter_names)
        for node, parameter in zip(placeholders, signature.leaf_parameters(), strict=True):
            if parameter is None:
                self.bind(node)
            else:
                self.local[node] = parameter
        self.line(f"def forward(self{signature.parameters}):", outer=True)
        self._check_entry(f"self{signature.parameters}", is_alone=not signature.has_extras)
        self.leaves = [self.local[node] for node in placeholders]
        for text in signature.flatten_lines(self.leaves, self.object_name):
            self.line(text)
        if self.is_root:
            is_strict = self.object_name(is_strict_export)
            function = self.object_name(check_strict_export)
            self.line(f"if {is_strict}():")
            self.line(f"    {function}({', '.join(['self', *self.leaves])})")

    def _check_entry(self, arguments: str, *, is_alone: bool) -> None:
        if not self.is_checked:
            return
        self.mode, mode = self.variable("mode"), f"{self.object_name(RUN, 'run')}.mode"
        if is_alone:
            is_strict = self.object_name(is_strict_export)
            self.line(f"if not ({self.mode} := {mode}) and not {is_strict}():")
            self.line(f"    return {self.object_name(start)}({arguments})")
        else:
            self.line(f"{self.mode} = {mode}")

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
        """Return, for each node, the values whose last use it is."""
        seen: set[Node] = set()
        dead: dict[Node, list[Node]] = {}
        for node in reversed(nodes):
            for source in () if is_pass_through(node) else map(_origin, node.all_input_nodes):
                if source not in seen:
                    seen.add(source)
                    if node.op != "output" and source.op not in {"placeholder", "get_attr"}:
                        dead.setdefault(node, []).append(source)
        return dead

    def _node(self, node: Node, dead: Sequence[Node]) -> None:
        if node.op == "get_attr":
            text = self.attribute(str(node.target))
            if len(node.users) == 1:
                # Inlined at its use.
                self.local[node] = text
                return
            self.line(f"{self.bind(node)} = {text}")
            return
        if node.op == "call_function" and self._mode(node):
            return
        if is_pass_through(node):
            self.local[node] = self.local[_origin(node)]
            return
        text = self._call(node)
        if not self.unread.issuperset(node.users):
            text = f"{self.bind(node, heir_of=dead)} = {text}"
        # Free values after their last use.
        names = [self.local[value] for value in dead]
        names = [name for name in names if name != self.local.get(node)]
        self.line(f"{text}; {' = '.join(names)} = None" if names else text, _comment(node))

    def _mode(self, node: Node) -> bool:
        """Open or close a block at a mode switch; return whether ``node`` is one."""
        if node.target is SET_GRAD_MODE or node.target is ENTER_AUTOCAST:
            if "closes" in node.meta:
                self._close_block()
                return True
            manager = torch.set_grad_enabled if node.target is SET_GRAD_MODE else torch.autocast
            arguments = self.arguments(node.args, {})
            if node.target is ENTER_AUTOCAST:
                device, dtype, enabled, cache = (self.argument(value) for value in node.args)
                arguments = f"{device}, dtype={dtype}, enabled={enabled}, cache_enabled={cache}"
            self.line(f"with {self.object_name(manager)}({arguments}):", _comment(node))
            self.indent += "    "
            return True
        if node.target is EXIT_AUTOCAST:
            self._close_block()
            return True
        return False

    def _close_block(self) -> None:
        # Between two adjacent regions there may be an empty one.
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
            target: Any = node.target
            kwargs = node.kwargs
            if isinstance(target, partial):
                target, kwargs = target.func, target.keywords
            function = self.object_name(callable_for(target, kwargs))
            return f"{function}({self.arguments(node.args, kwargs)})"
        if node.op == "call_module":
            return self._call_child(node)
        if node.op == "call_method":
            value, *rest = node.args
            method, owner = str(node.target), self.argument(value)
            if is_name(method):
                return f"{owner}.{method}({self.arguments(rest, node.kwargs)})"
            getter = f"{self.object_name(getattr)}({owner}, {method!r})"
            return f"{getter}({self.arguments(rest, node.kwargs)})"
        raise TypeError(f"a graph cannot have a node of kind {node.op!r}")

    def _call_child(self, node: Node) -> str:
        path, specialization = split_call_target(str(node.target))
        kwargs = dict(node.kwargs)
        called = module = self.attribute(path, is_module=True)
        extras = kwargs.pop(EXTRA_INPUTS, ())
        if SITE in node.meta and (specialization is not None or extras):
            function = self.object_name(call_specialization)
            options = f"{specialization or 0}"
            if extras or EXTRA_OUTPUTS in node.meta:
                options += f", {self.argument(extras)}"
            if EXTRA_OUTPUTS in node.meta:
                options += ", has_outputs=True"
            called = f"{function}(self, {module}, {path!r}, {options})"
        elif self.mode:
            child = self.callee = self.callee or self.variable("callee")
            # Inlined and without torch's __call__, both of which would slow small calls.
            is_unchanged = f"({child} := {module}).__dict__.get({UNCHANGED!r}) == {path!r}"
            is_direct = f"{is_unchanged} and {self.mode} > {DIRECT}"
            other = child
            if SITE in node.meta:
                other = f"{self.object_name(enter)}(self, {child}, {path!r})"
            called = f"({child}.forward if {is_direct} else {other})"
        return f"{called}({self.arguments(node.args, kwargs)})"

    def attribute(self, path: str, *, is_module: bool = False) -> str:
        """Return an expression that reads an attribute of this module.

        Args:
            path: Dotted path.
            is_module: Whether it is a child to be called.
        """
        if path in self.attributes:
            return self.object_name(self.attributes[path], SERIAL.sub("", path))
        text = "self"
        parts = path.split(".")
        for index, part in enumerate(parts):
            if is_module:
                # Not by attribute access, which searches parameters and buffers first.
                inner = f"{self.object_name(inner_child)}({text}, {part!r})" if index else ""
                text = inner or f"{text}._modules[{part!r}]"
            elif index < len(parts) - 1 and not is_name(part):
                # As in torch's containers, so that compilers know the child's name.
                text = f"{text}._modules[{part!r}]"
            elif part in RESERVED_NAMES:
                text = f"{self.object_name(lookup)}({text}, {part!r})"
            elif is_name(part):
                text = f"{text}.{part}"
            else:
                text = f"{self.object_name(getattr)}({text}, {part!r})"
        return text

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return the source of a call's arguments."""
        texts = [self.argument(value) for value in args]
        if all(is_name(name) for name in kwargs):
            texts += [f"{name}={self.argument(value)}" for name, value in kwargs.items()]
        else:
            pairs = [f"{name!r}: {self.argument(value)}" for name, value in kwargs.items()]
            texts.append(f"**{{{', '.join(pairs)}}}")
        return ", ".join(texts)

    def argument(self, value: Any) -> str:
        """Return the source of one argument."""
        if isinstance(value, Node):
            return self.local[value]
        if value is None or type(value) in _LITERALS:
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else self.object_name(value)
        kind = next((kind for kind in (tuple, list, dict) if isinstance(value, kind)), None)
        if kind and not hasattr(value, "_fields"):
            items = value.values() if kind is dict else value
            keys = map(self.argument, value) if kind is dict else ()
            return container_text(kind, [self.argument(item) for item in items], keys)
        if isinstance(value, slice):
            parts = (self.argument(part) for part in (value.start, value.stop, value.step))
            return f"{self.object_name(slice)}({', '.join(parts)})"
        return self.object_name(value)

    def line(self, text: str, comment: str = "", *, outer: bool = False) -> None:
        """Add a line with an optional comment, indented unless it is ``outer``."""
        self.lines.append(text if outer else self.indent + text)
        self.comments.append(comment)


def _unpacks(node: Node) -> bool:
    """Return whether a node unpacks one or all values of a result."""
    target: Any = node.target
    return target is operator.getitem or getattr(target, "func", None) is flatten_like


def _origin(node: Node) -> Node:
    """Return the value that ``node`` is a pass-through alias of."""
    while is_pass_through(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _comment(node: Node) -> str:
    """Return ``file:line in function: code`` of the node's innermost frame, on one line."""
    frames: Sequence[SourceFrame] = source_frames(node)
    if node.op == "call_module" and frames:
        frames = _frames_outside(node, frames)
    return location(frames[-1]) if frames else ""


def _frames_outside(node: Node, frames: Sequence[SourceFrame]) -> Sequence[SourceFrame]:
    """Return the caller's frames of a module call, whose node has frames inside the callee."""
    path = split_call_target(str(node.target))[0]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    while stack and not f".{stack.pop()[0]}".endswith(f".{path}"):
        pass
    # The caller and its enclosing modules remain.
    calls = [number for number, frame in enumerate(frames) if frame.function == "forward"]
    if 0 < len(stack) < len(calls):
        return frames[: calls[len(stack)]]
    return [frame for frame in frames if not frame.file.startswith(TORCH_FOLDER)] or frames
