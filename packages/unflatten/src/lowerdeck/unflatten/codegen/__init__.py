"""Generate the Python source of a module from its graph."""

from lowerdeck.unflatten.codegen.source import Source, write_source
from lowerdeck.unflatten.codegen.targets import OWN_NAMES, call_target, lookup, split_call_target

__all__ = [
    "OWN_NAMES",
    "Source",
    "call_target",
    "lookup",
    "split_call_target",
    "write_source",
]
