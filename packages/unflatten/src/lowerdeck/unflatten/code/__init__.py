"""The Python source of a module, and what it names."""

from lowerdeck.unflatten.code.call_targets import (
    OWN_NAMES,
    call_target,
    form_name,
    lookup,
    split_call_target,
)
from lowerdeck.unflatten.code.check import Check
from lowerdeck.unflatten.code.code import Source, write_source
from lowerdeck.unflatten.code.failures import TORCH_FOLDER, told

__all__ = [
    "OWN_NAMES",
    "TORCH_FOLDER",
    "Check",
    "Source",
    "call_target",
    "form_name",
    "lookup",
    "split_call_target",
    "told",
    "write_source",
]
