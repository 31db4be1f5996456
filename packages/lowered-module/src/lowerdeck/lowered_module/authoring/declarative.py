"""Declarative backends: a visitor for each operator, and one ``compile``."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.backend import (
    BackendDetails,
    CompileSpec,
    PreprocessResult,
)
from lowerdeck.lowered_module.authoring.node_partitioner import NodePartitioner
from lowerdeck.lowered_module.authoring.partition_view import PartitionView
from lowerdeck.lowered_module.authoring.registry import backend_name
from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.errors import LoweringError, UnsupportedOperatorError
from lowerdeck.torch_base import OpOverload, describe_node, is_getitem, pytree, schema_of

Visitor = TypeVar("Visitor", bound=Callable[..., Any])

_VISITS = "_lowerdeck_visits"


def visits(
    *operators: str,
    dtypes: Collection[torch.dtype] | None = None,
    ranks: Collection[int] | None = None,
    static: bool = False,
    when: Callable[[Node], bool | str] | None = None,
) -> Callable[[Visitor], Visitor]:
    """Mark a method of a ``DeclarativeBackend`` as the visitor of operators.

    The backend supports the calls that meet the conditions. A method may be marked several times,
    for different operators or with alternative conditions.

    Args:
        *operators: Names such as ``"aten.add.Tensor"``; ``"aten.relu"`` is
            ``"aten.relu.default"``.
        dtypes: Supported dtypes of all inputs and outputs; None for any.
        ranks: Supported ranks of all inputs and outputs; None for any.
        static: Whether all sizes must be static.
        when: A predicate on the node; it returns True, False, or a str with the reason for
            refusal.

    Raises:
        LoweringError: A name is not the name of an operator.
    """
    for name in operators:
        _find_operator(name)  # or refuse it

    def mark(function: Visitor) -> Visitor:
        conditions = _Conditions(function, dtypes, ranks, static, when)
        marks = [(_full_name(name), conditions) for name in operators]
        setattr(function, _VISITS, (*getattr(function, _VISITS, ()), *marks))
        return function

    return mark


class _Conditions(NamedTuple):
    """Conditions on the calls of one visitor; see ``visits`` for the attributes."""

    visitor: Callable[..., Any]
    dtypes: Collection[torch.dtype] | None
    ranks: Collection[int] | None
    static: bool
    when: Callable[[Node], bool | str] | None

    def objection(self, node: Node) -> str | None:
        """Return the reason why ``node`` is not supported, or None."""
        for tensor in _tensors_of(node):
            if self.dtypes is not None and tensor.dtype not in self.dtypes:
                return f"dtype {tensor.dtype} is not among {_listed(self.dtypes)}"
            if self.ranks is not None and tensor.dim() not in self.ranks:
                return f"{tensor.dim()} dimensions are not among {_listed(self.ranks)}"
            if self.static and any(not isinstance(size, int) for size in tensor.shape):
                return f"shape {tuple(tensor.shape)} is not static"
        if self.when is None:
            return None
        answer = self.when(node)
        if isinstance(answer, str):
            return answer
        return None if answer else "its predicate returned False"


class DeclarativeBackend(BackendDetails):
    """A backend defined by its visitors.

    The library selects nodes, passes constants, numbers inputs and outputs, builds the debug map,
    collects the reasons for refusals, and reports errors with source lines.

    A new instance is created for each partition, so visitors may keep state in ``self``:
    ``begin_partition`` runs first, then the visitors in the order of the nodes, then ``compile``.
    Nodes without a visitor that depend on no input of the program are folded if only one
    partition reads them, and are among its constants.

    Attributes:
        min_nodes: Smallest number of nodes in a partition.
        owns_state: Whether delegates own the buffers that they mutate. If so, ``compile`` must
            include ``part.mutations``. If not, the buffers are inputs of the delegate, which
            returns their new values.

    Example:
        >>> class Adder(DeclarativeBackend):
        ...     @visits("aten.add.Tensor")
        ...     def add(self, part, node):
        ...         found = arguments_of(node)
        ...         left, right = part.index(found["self"]), part.index(found["other"])
        ...         part.emit(f"{part.index(node)} = {left} + {found['alpha']} * {right}")
        ...
        ...     def compile(self, part):
        ...         return "; ".join(part.instructions).encode()
        >>> import torch
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x
        >>> program = torch.export.export(Model(), (torch.ones(2),))
        >>> lowered = to_backend(program, Adder.partitioner())
        >>> get_lowered_backend_modules(lowered.graph_module)[0].processed_bytes
        b'1 = 0 + 1 * 0'
    """

    min_nodes: ClassVar[int] = 1
    owns_state: ClassVar[bool] = False

    def begin_partition(self, part: PartitionView) -> None:
        """Prepare for the visitors; the default does nothing.

        Args:
            part: The partition before any visit.
        """

    @abstractmethod
    def compile(self, part: PartitionView) -> bytes:
        """Return the blob; called after all nodes were visited.

        Args:
            part: The partition, with the instructions that visitors emitted.
        """

    @classmethod
    def partitioner(cls, compile_specs: Sequence[CompileSpec] = ()) -> DeclarativePartitioner:
        """Return a partitioner for all nodes that the visitors support.

        Args:
            compile_specs: The compile specs of each partition.
        """
        return DeclarativePartitioner(cls, compile_specs=compile_specs)

    @classmethod
    def supported_operators(cls) -> list[str]:
        """Return the sorted names of the visited operators."""
        return sorted(_visitors(cls))

    @classmethod
    def preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Visit the nodes in order, compile, and return the result with its debug map.

        Args:
            compile_specs: The settings from the partitioner.

        Raises:
            UnsupportedOperatorError: A node has no visitor; the error names operator, node and
                source.
        """
        visitors = _visitors(cls)
        backend = cls()
        part = PartitionView(edge_program, compile_specs)
        backend.begin_partition(part)
        for node in edge_program.graph.nodes:
            if node.op != "call_function" or node in part.ahead:
                continue
            visitor = visitors.get(operator_name(node))
            if visitor is None and is_getitem(node):
                continue
            if visitor is None:
                raise UnsupportedOperatorError(
                    f"backend {backend_name(cls)!r} cannot compile {describe_node(node)}; it "
                    f"supports {', '.join(sorted(visitors)) or 'nothing'}: leave the node "
                    "untagged, or add a visitor"
                )
            with part.visiting(node):
                visitor[0].visitor(backend, part, node)
        blob = backend.compile(part)
        return PreprocessResult(
            blob, part.debug_map.get_delegate_mapping(), part.named_data_output()
        )


class DeclarativePartitioner(NodePartitioner):
    """Partitioner of a declarative backend: delegates all nodes that its visitors support.

    Derive from it and override ``objection`` for conditions beyond those of ``visits``.

    Args:
        compile_specs: The compile specs of each partition.
        min_nodes: Smallest number of nodes in a partition; ``backend.min_nodes`` if None.
    """

    def __init__(
        self,
        backend: type[DeclarativeBackend],
        *,
        compile_specs: Sequence[CompileSpec] = (),
        min_nodes: int | None = None,
    ) -> None:
        super().__init__(
            backend_name(backend),
            compile_specs=compile_specs,
            min_nodes=backend.min_nodes if min_nodes is None else min_nodes,
            owns_state=backend.owns_state,
            computes_ahead=True,
        )
        self._visitors = _visitors(backend)
        self._unknown = f"{backend_name(backend)} has no such operator"

    def objection(self, node: Node) -> str | None:
        """Return the reason why no visitor supports ``node``, or None if one does.

        Args:
            node: A call in the program or in a nested graph.
        """
        name = operator_name(node)
        reasons = [visitor.objection(node) for visitor in self._visitors.get(name, ())]
        if None in reasons:
            return None
        return " and ".join(dict.fromkeys(map(str, reasons))) or self._unknown

    def ops_to_not_decompose(
        self,
        ep: ExportedProgram,  # noqa: ARG002  (the same for every program)
    ) -> tuple[list[OpOverload], None]:
        """Return the visited operators, which must not be decomposed.

        Args:
            ep: The program before decomposition.
        """
        operators = map(_find_operator, self._visitors)
        return [op for op in operators if op is not None], None


def _visitors(backend: type[DeclarativeBackend]) -> Mapping[str, Sequence[_Conditions]]:
    """Return the conditions of the visitors, by operator name.

    A class that visits an operator overrides the visitors of its base classes.
    """
    visitors: dict[str, list[_Conditions]] = {}
    for base in reversed(backend.__mro__):
        own: dict[str, list[_Conditions]] = {}
        for member in vars(base).values():
            for name, conditions in getattr(member, _VISITS, ()):
                own.setdefault(name, []).append(conditions)
        visitors |= own
    return visitors


def _find_operator(name: object) -> OpOverload | None:
    """Return the torch operator with this name, or None if it may belong to another library.

    Operators of torch must exist; those of other libraries may be registered later. A name without
    a dot is a function, such as the higher-order operator ``cond``.

    Raises:
        LoweringError: ``name`` is not a string, or torch has no such operator on tensors.
    """
    if not isinstance(name, str):
        raise LoweringError(
            f"found {name!r} as an operator, expected its name, such as 'aten.add.Tensor'"
        )
    namespace, dot, rest = name.partition(".")
    if not dot:
        if hasattr(torch.ops.aten, name) and not hasattr(operator, name):
            raise LoweringError(f"found {name!r} as an operator, expected 'aten.{name}'")
        return None
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    if packet is None:
        if namespace == "aten":
            raise LoweringError(f"torch has no operator {name!r}")
        return None
    # Overloads without tensors, such as aten::add.int, are TorchScript's.
    every = {key: getattr(packet, key) for key in packet.overloads()}
    overloads = {key: op for key, op in every.items() if "Tensor" in str(schema_of(op))}
    if (overload or "default") not in overloads:
        names = ", ".join(f"{namespace}.{short}.{key}" for key in overloads)
        raise LoweringError(
            f"torch has no operator {_full_name(name)!r} on tensors; it has {names}"
        )
    result: OpOverload = overloads[overload or "default"]
    return result


def _full_name(name: str) -> str:
    """Return an operator's name with its overload."""
    return f"{name}.default" if name.count(".") == 1 else name


def _tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """Yield the input and output tensors of a node that its metadata contains."""
    for source in (*node.all_input_nodes, node):
        for leaf in pytree.tree_leaves(source.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                yield leaf


def _listed(values: Collection[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))
