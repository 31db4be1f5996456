"""Supported operators, one module for each family."""

from lowerdeck.openvino.operators.elementwise import Elementwise
from lowerdeck.openvino.operators.matrices import Matrices
from lowerdeck.openvino.operators.movement import Movement
from lowerdeck.openvino.operators.norms import Norms
from lowerdeck.openvino.operators.quantized import Quantized
from lowerdeck.openvino.operators.reductions import Reductions
from lowerdeck.openvino.operators.windows import Windows

__all__ = [
    "Elementwise",
    "Matrices",
    "Movement",
    "Norms",
    "Quantized",
    "Reductions",
    "Windows",
]
