"""A partition as seen by the visitors of a declarative backend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from lowerdeck.lowered_module.authoring.backend import CompileSpec
from lowerdeck.lowered_module.authoring.delegate_mapping import DelegateMappingBuilder
from lowerdeck.lowered_module.program.debug_handles import HANDLE
from lowerdeck.lowered_module.program.foldable import fold_node
from lowerdeck.lowered_module.program.graphs import MUTATIONS, inputs_of, outputs_of
from lowerdeck.lowered_module.program.tags import AHEAD
from lowerdeck.serializer import NamedDataStore, NamedDataStoreOutput
from lowerdeck.torch_base import bytes_of, describe_node


class PartitionView:
    """A partition with numbered values, and the instructions emitted so far.

    Args:
        program: The partition as a program.
        compile_specs: The settings from the partitioner.

    Attributes:
        program: The partition as a program.
        compile_specs: The settings from the partitioner, by key.
        inputs: Placeholders of the delegate's arguments, in order.
        constants: The tensor of each owned placeholder that is read or mutated, and of each folded
            call that is read.
        ahead: Calls that are folded at compile time, and assertions about their results; they
            are not visited.
        outputs: The nodes whose values the delegate returns, in order.
        mutations: For each mutated owned placeholder, the node of its new value.
        debug_map: The nodes of each instruction, by number or identifier.
        named_data: Blobs that the runtime looks up by key.
    """

    def __init__(self, program: ExportedProgram, compile_specs: Sequence[CompileSpec]) -> None:
        self.program = program
        self.compile_specs: dict[str, bytes] = {spec.key: spec.value for spec in compile_specs}
        self.instructions: list[Any] = []
        self.debug_map: DelegateMappingBuilder = DelegateMappingBuilder()
        self.named_data: NamedDataStore = NamedDataStore()
        self._numbers: dict[Node, int] = {}
        self._node: Node | None = None
        values = {**program.constants, **program.state_dict}
        self.inputs: list[Node] = []
        self.constants: dict[Node, torch.Tensor] = {}
        owned: dict[str | None, Node] = {}
        for node, spec in inputs_of(program):
            if spec.kind == InputKind.USER_INPUT:
                self.inputs.append(node)
            elif spec.target is not None:
                data = values[spec.target]
                # Detached: operations on a parameter would record autograd history.
                self.constants[node] = data.detach() if isinstance(data, torch.Tensor) else data
                owned[spec.target] = node
        self.outputs: list[Node] = []
        mutations: dict[Node, Node] = {}
        for value, output in outputs_of(program):
            if output.kind in MUTATIONS:
                mutations[owned[output.target]] = value
            else:
                self.outputs.append(value)
        self.mutations: Mapping[Node, Node] = mutations
        self.ahead: dict[Node, None] = {
            node: None for node in program.graph.nodes if AHEAD in node.meta
        }
        computed: dict[Node, Any] = dict(self.constants)
        for node in self.ahead:
            computed[node] = fold_node(node, computed.__getitem__)
            is_read = any(user not in self.ahead for user in node.users)
            if is_read and isinstance(computed[node], torch.Tensor):
                self.constants[node] = computed[node]
        for node in [n for n in self.constants if n not in mutations and self._is_unread(n)]:
            # Unread data may be tagged as well.
            del self.constants[node]

    def _is_unread(self, node: Node) -> bool:
        return all(user in self.ahead for user in node.users)

    def index(self, value: Node) -> int:
        """Return the number of a node's value: 0, 1, ... in the order of first use.

        Args:
            value: A node of the partition.
        """
        return self._numbers.setdefault(value, len(self._numbers))

    def parts(self, node: Node) -> list[Node | None]:
        """Return the getitem of each element of a node's value, or None for an unread element.

        Args:
            node: A node with several values.
        """
        elements: list[Node | None] = [None] * len(node.meta["val"])
        for user in node.users:
            if isinstance(user.args[1], int):
                elements[user.args[1]] = user
        return elements

    def emit(
        self,
        instruction: Any,
        *,
        nodes: Iterable[Node] = (),
        identifier: int | str | None = None,
    ) -> int:
        """Append an instruction, mapped to its nodes; return its number.

        Args:
            instruction: Any object; ``compile`` converts it to bytes.
            nodes: The nodes that it computes, such as a convolution and the relu fused with it; by
                default the visited node.
            identifier: The identifier that the runtime logs; the instruction's number if None.

        Raises:
            DelegateMappingError: The identifier is a duplicate, or an int where earlier ones are
                str or vice versa.
        """
        number = len(self.instructions)
        self.instructions.append(instruction)
        visited = [] if self._node is None else [self._node]
        # No debug handles: the partition was not cut by to_backend, and its map is unused.
        computed = [node for node in list(nodes) or visited if HANDLE in node.meta]
        if computed:
            self.debug_map.insert_delegate_mapping_entry(
                nodes=computed, identifier=number if identifier is None else identifier
            )
        return number

    def store(self, key: str, tensor: torch.Tensor, *, alignment: int = 16) -> None:
        """Add the elements of a tensor, in row-major order, to the named data.

        Args:
            key: Key for the runtime; partitions that store the same bytes under the same key
                share them.
            tensor: A dense tensor, such as one of ``constants``; copied only if it is not
                contiguous or not on the CPU.
            alignment: Alignment in the file, in bytes.
        """
        self.named_data.add_named_data(key, bytes_of(tensor), alignment=alignment)

    def named_data_output(self) -> NamedDataStoreOutput | None:
        """Return the named data, or None if there is none."""
        output = self.named_data.get_named_data_store_output()
        return output if output.buffers else None

    @contextmanager
    def visiting(self, node: Node) -> Iterator[None]:
        """Map instructions emitted in this context to ``node``, and name ``node`` in errors."""
        self._node = node
        try:
            yield
        except Exception as error:
            error.add_note(f"while visiting {describe_node(node)}")
            raise
        finally:
            self._node = None
