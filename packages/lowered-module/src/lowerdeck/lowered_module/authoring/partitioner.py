"""Partitioners: select the nodes for a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram

from lowerdeck.lowered_module.authoring.backend import CompileSpec
from lowerdeck.lowered_module.errors import PartitionError
from lowerdeck.torch_base import OpOverload


class DelegationSpec(NamedTuple):
    """Backend and settings of one partition.

    Attributes:
        backend_id: Name of the backend.
        compile_specs: Settings for the backend.
    """

    backend_id: str
    compile_specs: list[CompileSpec]


@dataclass(slots=True)
class PartitionResult:
    """A tagged program, and the meaning of each tag.

    Attributes:
        tagged_exported_program: The partitioner's argument, with ``node.meta["delegation_tag"]``
            on the nodes to delegate and no other change.
        partition_tags: For each tag the backend and its specs. Tags without nodes are ignored.
    """

    tagged_exported_program: ExportedProgram
    partition_tags: Mapping[str, DelegationSpec]


class Partitioner(ABC):
    """Base class: selects the nodes to delegate by tagging them.

    Args:
        spec: Settings of the partitioner, kept as a read-only mapping.

    Attributes:
        refused: Why nodes were not delegated in the last call of ``partition``, by node name; a
            partitioner may assign it.
        remarks: Remarks on delegated nodes of the last call, by heading (such as ``"computed in
            float"``) and node name. Summaries show them.

    Example:
        >>> class Everything(Partitioner):
        ...     def partition(self, exported_program):
        ...         for node in exported_program.graph.nodes:
        ...             if node.op == "call_function":
        ...                 node.meta["delegation_tag"] = "all"
        ...         return PartitionResult(exported_program, {"all": DelegationSpec("Mine", [])})
    """

    refused: Mapping[str, str] = MappingProxyType({})
    remarks: Mapping[str, Mapping[str, str]] = MappingProxyType({})

    def __init__(
        self, spec: Mapping[str | int | float | bool, object] = MappingProxyType({})
    ) -> None:
        self._spec = MappingProxyType(dict(spec))

    def __call__(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return ``partition(exported_program)``."""
        return self.partition(exported_program)

    @property
    def spec(self) -> Mapping[str | int | float | bool, object]:
        """The settings passed to the constructor."""
        return self._spec

    @abstractmethod
    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with tags, and the meaning of the tags.

        Args:
            exported_program: A copy whose weights are fake tensors: shapes and dtypes can be read,
                values cannot. Nodes of nested graphs may be tagged too; a delegate never spans
                two graphs.

        Returns:
            The same program with tags on its nodes, and the meaning of each tag.
        """

    def ops_to_not_decompose(
        self,
        ep: ExportedProgram,  # noqa: ARG002  (for those who override it)
    ) -> tuple[list[OpOverload], Callable[[torch.fx.Node], bool] | None]:
        """Return the operators that this partitioner requires undecomposed.

        Args:
            ep: The program before decomposition.

        Returns:
            The operators, and a predicate that selects the calls to keep, or None to keep all.
        """
        return [], None


PartitionerLike = Callable[[ExportedProgram], Any]


def require_partitioner(value: object) -> None:
    """Check that an argument is a partitioner.

    Raises:
        PartitionError: ``value`` is not a partitioner.
    """
    if isinstance(value, type):
        made_by = ".partitioner" if hasattr(value, "partitioner") else ""
        description = f"the class {value.__name__}"
        expected = f"an instance: pass {value.__name__}{made_by}()"
    elif isinstance(value, list | tuple):
        description = f"a {type(value).__name__}"
        expected = "one Partitioner: call to_backend once for each, in order of precedence"
    elif not callable(value):
        description = f"a {type(value).__name__}"
        expected = (
            "a Partitioner, or another callable that takes a program: to_backend(program, "
            "XnnpackPartitioner())"
        )
    else:
        return
    raise PartitionError(f"found {description} as partitioner, expected {expected}")
