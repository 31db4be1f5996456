"""The graph of a program cut into those of its modules."""

from lowerdeck.unflatten.cut.cutting import cut
from lowerdeck.unflatten.cut.direct import direct_graph
from lowerdeck.unflatten.cut.preserved import Absent, FlatCall, SignatureApplier
from lowerdeck.unflatten.cut.program_copy import ProgramCopier
from lowerdeck.unflatten.cut.working_graph import WorkingGraph, attribute_modules

__all__ = [
    "Absent",
    "FlatCall",
    "ProgramCopier",
    "SignatureApplier",
    "WorkingGraph",
    "attribute_modules",
    "cut",
    "direct_graph",
]
