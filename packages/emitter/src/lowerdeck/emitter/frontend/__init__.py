"""Convert an exported program to the functional IR."""

from lowerdeck.emitter.frontend.constants import ConstantPool
from lowerdeck.emitter.frontend.containers import container_metadata
from lowerdeck.emitter.frontend.delegates import DelegatePool
from lowerdeck.emitter.frontend.provenance import Provenance
from lowerdeck.emitter.frontend.read_graph import read_method
from lowerdeck.emitter.frontend.state_sharing import find_states
from lowerdeck.emitter.frontend.states import StatePool
from lowerdeck.emitter.frontend.tensors import ValueFactory, layout_of

__all__ = [
    "ConstantPool",
    "DelegatePool",
    "Provenance",
    "StatePool",
    "ValueFactory",
    "container_metadata",
    "find_states",
    "layout_of",
    "read_method",
]
