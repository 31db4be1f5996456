"""Names whose memory overlaps and is written in place, which no program of values can say."""

from __future__ import annotations

from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.torch_base.behaviours import writes_in_place
from lowerdeck.torch_base.memory import MemoryUse, shared_inputs


@dataclass(frozen=True, slots=True)
class WrittenOverlap:
    """Parameters, buffers or constants that overlap, and a node that writes them in place.

    Attributes:
        names: Their names in the model, those that the graph uses.
        writer: The node.
    """

    names: tuple[str, ...]
    writer: Node

    def __str__(self) -> str:
        names = " and ".join(map(repr, self.names))
        writer = f"{self.writer.name!r} ({self.writer.target})"
        return f"{names} overlap in memory, and {writer} writes it"


def written_overlap(program: ExportedProgram) -> WrittenOverlap | None:
    """Return names of ``program`` that overlap in memory that it writes in place, or None.

    torch's functionalisation fails on these, and says nothing of the names.

    Args:
        program: A program as ``explicit`` returns it: two names of one tensor are one there.
    """
    if not writes_in_place(program.graph_module):
        return None
    memory = MemoryUse.of_program(program)
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for nodes in shared_inputs(program):
        writers = memory.writers(nodes[0])
        used = tuple(str(targets[node.name]) for node in nodes if node.users)
        if writers and len(used) > 1:
            return WrittenOverlap(used, writers[0])
    return None
