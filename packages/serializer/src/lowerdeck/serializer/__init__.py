"""Read, write and verify ExecuTorch's .pte and .ptd files, without torch."""

from lowerdeck.serializer.errors import SerializerError

__all__ = ["SerializerError"]
