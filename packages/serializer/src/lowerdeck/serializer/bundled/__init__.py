"""The ``.bpte`` file: a program with inputs to try it on, and the results expected of them."""

from lowerdeck.serializer.bundled.bundle import (
    BundledProgram,
    BundledTensor,
    BundledValue,
    MethodTestCase,
    MethodTestSuite,
)
from lowerdeck.serializer.bundled.bundle_read import deserialize_bundle, is_bundle
from lowerdeck.serializer.bundled.bundle_write import serialize_bundle, write_bundle

__all__ = [
    "BundledProgram",
    "BundledTensor",
    "BundledValue",
    "MethodTestCase",
    "MethodTestSuite",
    "deserialize_bundle",
    "is_bundle",
    "serialize_bundle",
    "write_bundle",
]
