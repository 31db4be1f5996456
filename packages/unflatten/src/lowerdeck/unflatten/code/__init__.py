"""The Python source of a module, and what it names."""

from lowerdeck.unflatten.code.call_targets import (
    OWN_NAMES,
    call_target,
    form_name,
    lookup,
    split_call_target,
)
from lowerdeck.unflatten.code.code import Source, write_source
from lowerdeck.unflatten.code.known_sizes import result_checks, symbols_asked
from lowerdeck.unflatten.code.result_check import SIZES, Check, sizes_of

__all__ = [
    "OWN_NAMES",
    "SIZES",
    "Check",
    "Source",
    "call_target",
    "form_name",
    "lookup",
    "result_checks",
    "sizes_of",
    "split_call_target",
    "symbols_asked",
    "write_source",
]
