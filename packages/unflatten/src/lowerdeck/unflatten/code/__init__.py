"""The Python source of a module, and what it names."""

from lowerdeck.unflatten.code.call_targets import (
    OWN_NAMES,
    call_target,
    form_name,
    lookup,
    split_call_target,
)
from lowerdeck.unflatten.code.code import Source, write_source

__all__ = [
    "OWN_NAMES",
    "Source",
    "call_target",
    "form_name",
    "lookup",
    "split_call_target",
    "write_source",
]
