"""Partitions given to backends, here or elsewhere, and their results kept."""

from lowerdeck.lowered_module.preprocess.cache import ResultCache
from lowerdeck.lowered_module.preprocess.delegate import make_delegate
from lowerdeck.lowered_module.preprocess.preprocess import preprocess_partitions
from lowerdeck.lowered_module.preprocess.task import SharedWeights

__all__ = [
    "ResultCache",
    "SharedWeights",
    "make_delegate",
    "preprocess_partitions",
]
