"""One partition as the visitors of a declarative backend see it."""

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
    """A partition, its values numbered, and what is compiled of it so far.

    Args:
        program: The partition as a program.
        compile_specs: What the partitioner wanted the backend to know.

    Attributes:
        program: The partition as a program.
        compile_specs: What the partitioner wanted the backend to know, by key.
        inputs: The placeholders of what the delegate is called with, in order.
        constants: The tensor of each placeholder that the partition owns and reads or changes, and
            of each call that is computed ahead of time and read.
        ahead: Those calls, and what they alone read; no visitor is called for them.
        outputs: The nodes whose values the delegate returns, in order.
        mutations: For each owned placeholder that changes, the node of its new value.
        debug_map: From each instruction, by number or identifier, to the nodes that it computes.
        named_data: Blobs that the runtime half asks for by key.
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
                held = values[spec.target]
                # A compiler wants values: a parameter would keep history of what it does to them.
                self.constants[node] = held.detach() if isinstance(held, torch.Tensor) else held
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
            # Unread data was given to some partition all the same.
            del self.constants[node]

    def _is_unread(self, node: Node) -> bool:
        return all(user in self.ahead for user in node.users)

    def index(self, value: Node) -> int:
        """Return the number of a node's value: 0, 1, ... in the order of asking.

        Args:
            value: A node of the partition.
        """
        return self._numbers.setdefault(value, len(self._numbers))

    def parts(self, node: Node) -> list[Node | None]:
        """Return the getitem of each of a node's several values, None for an unread one.

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
        """Append an instruction, mapped to the nodes that it computes; return its number.

        Args:
            instruction: Anything; ``compile`` makes bytes of it.
            nodes: What it computes, such as a convolution and the relu that is fused with it; the
                node being visited, if nothing is given.
            identifier: What the runtime half logs it by; the instruction's number, if None. A
                backend gives all or none.

        Raises:
            DelegateMappingError: The identifier is taken, or not like those before it.
        """
        number = len(self.instructions)
        self.instructions.append(instruction)
        visited = [] if self._node is None else [self._node]
        # Without handles the partition was not cut by to_backend: its map is unused.
        computed = [node for node in list(nodes) or visited if HANDLE in node.meta]
        if computed:
            self.debug_map.insert_delegate_mapping_entry(
                nodes=computed, identifier=number if identifier is None else identifier
            )
        return number

    def store(self, key: str, tensor: torch.Tensor, *, alignment: int = 16) -> None:
        """Put the elements of a tensor, in row-major order, into named data.

        Args:
            key: Under which the runtime half finds them; partitions that store the same bytes
                under the same key share them.
            tensor: A dense tensor, such as one of ``constants``; it is not copied.
            alignment: The bytes start at a multiple of this many bytes of the file.
        """
        self.named_data.add_named_data(key, bytes_of(tensor), alignment=alignment)

    def named_data_output(self) -> NamedDataStoreOutput | None:
        """Return the named data, or None where there is none."""
        output = self.named_data.get_named_data_store_output()
        return output if output.buffers else None

    @contextmanager
    def visiting(self, node: Node) -> Iterator[None]:
        """Map what is emitted meanwhile to ``node``, and note it on what is raised meanwhile.

        Args:
            node: The node being visited.
        """
        self._node = node
        try:
            yield
        except Exception as error:
            error.add_note(f"while visiting {describe_node(node)}")
            raise
        finally:
            self._node = None
