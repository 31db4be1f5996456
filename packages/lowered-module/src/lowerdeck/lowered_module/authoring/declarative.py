"""The short way to a backend: a table of operators, a visitor for each, one ``compile``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar, cast

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.lowered_module.authoring.backend import BackendDetails, PreprocessResult
from lowerdeck.lowered_module.authoring.compile_spec import CompileSpec
from lowerdeck.lowered_module.authoring.partition_view import PartitionView
from lowerdeck.lowered_module.authoring.registry import backend_name
from lowerdeck.lowered_module.authoring.rejects import operator_name
from lowerdeck.lowered_module.authoring.supported import (
    SupportedOp,
    full_name,
    require_operator_name,
)
from lowerdeck.lowered_module.authoring.table_partitioner import TablePartitioner
from lowerdeck.lowered_module.errors import UnsupportedOperatorError
from lowerdeck.torch_base import describe_node, is_getitem

Visitor = TypeVar("Visitor", bound=Callable[..., Any])

_VISITS = "_lowerdeck_visits"


def visits(*operators: str) -> Callable[[Visitor], Visitor]:
    """Mark a method of a ``DeclarativeBackend`` as the visitor of operators.

    Args:
        *operators: Names such as ``"aten.add.Tensor"``; ``"aten.relu"`` is
            ``"aten.relu.default"``.

    Raises:
        LoweringError: A name is no name of an operator.
    """
    for operator in operators:
        require_operator_name(operator)

    def mark(function: Visitor) -> Visitor:
        setattr(function, _VISITS, tuple(full_name(name) for name in operators))
        return function

    return mark


class DeclarativeBackend(BackendDetails):
    """A backend that only says which operators it takes and what becomes of each.

    Choosing nodes, owning constants, numbering inputs and outputs, the debug map, the
    reasons for what is left, and errors with source lines come with it.

    A new object is made for each partition, so that visitors may keep what they like in ``self``:
    ``begin_partition`` runs first, then the visitors in the order of the nodes, then ``compile``.
    What no input of the program changes and no entry of the table takes, such as a mask that is
    made of sizes alone, has been computed before and is one of the partition's constants.

    Attributes:
        supported: The operators, with what they must satisfy. An operator that is listed and has
            no visitor is refused when a partition with it is compiled.
        min_nodes: Partitions with fewer nodes are left to the program.
        owns_state: Whether partitions keep the buffers that they change: then ``compile`` must
            take ``part.mutations`` into the blob. Otherwise state stays with the program, which
            passes it in and writes what the delegate returns.

    Example:
        >>> class Adder(DeclarativeBackend):
        ...     supported = (SupportedOp("aten.add.Tensor"),)
        ...
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

    supported: ClassVar[Sequence[SupportedOp]] = ()
    min_nodes: ClassVar[int] = 1
    owns_state: ClassVar[bool] = False

    def begin_partition(self, part: PartitionView) -> None:
        """Prepare for the visitors; by default nothing is done.

        Args:
            part: The partition, of which no node has been visited: its inputs and constants can be
                given what visitors look up.
        """

    @abstractmethod
    def compile(self, part: PartitionView) -> bytes:
        """Return the blob, after all nodes were visited.

        Args:
            part: The partition, with the instructions that visitors emitted.
        """

    @classmethod
    def partitioner(cls, compile_specs: Sequence[CompileSpec] = ()) -> TablePartitioner:
        """Return a partitioner that gives this backend all that its table supports.

        Args:
            compile_specs: What the backend is to be told about each partition.
        """
        return TablePartitioner(
            backend_name(cls),
            cls.supported,
            compile_specs=compile_specs,
            min_nodes=cls.min_nodes,
            owns_state=cls.owns_state,
            computes_ahead=True,
        )

    @classmethod
    def supported_operators(cls) -> list[str]:
        """Return the sorted names of the operators in the table, for listings of backends."""
        return sorted({full_name(entry.name) for entry in cls.supported})

    @classmethod
    def preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Visit the nodes in order, compile, and return the result with its debug map.

        Args:
            edge_program: The partition.
            compile_specs: What the partitioner wanted this backend to know.

        Raises:
            UnsupportedOperatorError: A node has no visitor; operator, node and source are named.
        """
        visitors = cls._visitors()
        backend = cls()
        part = PartitionView(edge_program, compile_specs)
        backend.begin_partition(part)
        for node in edge_program.graph.nodes:
            visitor = visitors.get(operator_name(node))
            if node.op != "call_function" or node in part.ahead:
                continue
            if visitor is None and is_getitem(node):
                continue
            if visitor is None:
                raise _unsupported(backend_name(cls), node, visitors)
            with part.visiting(node):
                visitor(backend, part, node)
        blob = backend.compile(part)
        return PreprocessResult(
            blob, part.debug_map.get_delegate_mapping(), part.named_data_output()
        )

    @classmethod
    def _visitors(cls) -> dict[str, Callable[..., Any]]:
        found: dict[str, Callable[..., Any]] = {}
        for base in reversed(cls.__mro__):
            for member in vars(base).values():
                for name in getattr(member, _VISITS, ()):
                    found[name] = cast("Callable[..., Any]", member)
        return found


def _unsupported(backend: str, node: Node, known: Iterable[str]) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(
        f"backend {backend!r} cannot compile {describe_node(node)}; it knows "
        f"{', '.join(sorted(known)) or 'nothing'}: leave it out of the table, or visit it"
    )
