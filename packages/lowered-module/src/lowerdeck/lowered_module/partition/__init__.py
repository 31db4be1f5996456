"""Partitions cut out of a program, and delegates put in."""

from lowerdeck.lowered_module.partition.cut import Cut, CutProgram, cut_program
from lowerdeck.lowered_module.partition.edits import first_edit
from lowerdeck.lowered_module.partition.grouping import warn_of_lost_tags
from lowerdeck.lowered_module.partition.splice import splice_delegates

__all__ = [
    "Cut",
    "CutProgram",
    "cut_program",
    "first_edit",
    "splice_delegates",
    "warn_of_lost_tags",
]
