"""Contents of a ``.bpte`` file: a program and its test cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from lowerdeck.serializer.flatbuffer.storage import storage_size
from lowerdeck.serializer.flatbuffer.wire import parse_schema
from lowerdeck.serializer.pte.enums import ScalarType
from lowerdeck.serializer.pte.named_data import TensorLayout
from lowerdeck.serializer.pte.schema import Bool, Double, EValue, Int, Storage

BUNDLE_VERSION = 2
"""Schema version that ExecuTorch writes."""


@dataclass(slots=True)
class BundledTensor:
    """A tensor with its bytes, as an input or as an expected result.

    Attributes:
        dim_order: Dimensions from the outermost in memory to the innermost.
        data: The elements in that order, without gaps.
    """

    scalar_type: ScalarType
    sizes: list[int]
    dim_order: list[int]
    data: Storage

    @property
    def layout(self) -> TensorLayout:
        """Return the type and shape."""
        return TensorLayout(self.scalar_type, self.sizes, self.dim_order)

    def problem(self) -> str:
        """Return an error message if the shape or byte count is invalid, else ``""``."""
        size, expected = storage_size(self.data), self.layout
        if expected.problem() or expected.nbytes == size:
            return expected.problem()
        shape = f"{self.sizes} of {self.scalar_type!r}"
        return f"found {size} bytes for sizes {shape}, expected {expected.nbytes}"


BundledValue: TypeAlias = BundledTensor | Int | Bool | Double
"""One input or expected result."""


@dataclass(slots=True)
class MethodTestCase:
    """One call of a method.

    Attributes:
        inputs: All inputs, flat and in order.
        expected_outputs: All results, flat and in order; ExecuTorch's tools accept only tensors.
    """

    inputs: list[BundledValue] = field(default_factory=list)
    expected_outputs: list[BundledValue] = field(default_factory=list)


@dataclass(slots=True)
class MethodTestSuite:
    """The test cases of one method.

    Attributes:
        test_cases: Test cases, indexed from 0.
    """

    method_name: str
    test_cases: list[MethodTestCase] = field(default_factory=list)


@dataclass(slots=True)
class BundledProgram:
    """A program and its test cases.

    Attributes:
        program: The bytes of a ``.pte`` file.
        method_test_suites: One suite for each method with test cases.
        version: Version of the schema.
    """

    program: Storage
    method_test_suites: list[MethodTestSuite] = field(default_factory=list)
    version: int = BUNDLE_VERSION


BUNDLE_FORMAT = parse_schema(
    "bundled_program.fbs",
    {
        **{kind.__name__: kind for kind in (Int, Bool, Double, ScalarType)},
        "Tensor": BundledTensor,
        "Value": EValue,
    },
)
"""The tables of a ``.bpte`` file; the root is ``BundledProgram``."""
