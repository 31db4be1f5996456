"""The tables of a file become a logical program; nothing in them is trusted."""

from lowerdeck.serializer.pte.decoding.decode import PlanTable, ProgramDecoder
from lowerdeck.serializer.pte.decoding.decode_values import SCALAR_TYPES, member

__all__ = ["SCALAR_TYPES", "PlanTable", "ProgramDecoder", "member"]
