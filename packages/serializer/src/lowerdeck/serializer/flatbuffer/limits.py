"""Limits on what a reader decodes, in proportion to the size of the file."""

from __future__ import annotations

MAX_FLATBUFFER = (1 << 31) - 1
"""Largest FlatBuffer that the writer creates: its signed 32-bit offsets allow no more."""

MAX_TABLES = 1_000_000
"""The runtime's verifier rejects programs with more tables."""

MAX_RANK = 16
"""The runtime rejects tensors with more dimensions."""

MAX_TENSOR_BYTES = (1 << 63) - 1
"""The runtime counts bytes in signed 64-bit integers."""

MAX_PLANNED_MEMORY = 1 << 36
"""The runtime allocates planned memory at load; more than 64 GiB is taken as a mistake."""

MAX_OPERATOR_NAME = 99
"""The runtime copies ``name.overload`` into 100 bytes and crashes on longer names."""

MEMORY_PER_BYTE = 256
"""Limit on decoded bytes per byte of FlatBuffer, because 4-byte offsets may refer to one object
many times. Valid files with maximal sharing stay below 160.
"""

FREE_MEMORY = 1 << 16
"""Decoded bytes allowed in addition to ``MEMORY_PER_BYTE`` per byte, for tiny files."""

PREVIEW_BYTES = 4096
"""Bytes of a compile spec or blob that reports show; also the highest cost of one reference."""

MAX_OVERLAP = 4
"""Limit on the total size of segments per byte of file, and of constants per byte of their
segment. Our writer reaches 2: constants that are also named blobs or delegates.
"""

ENTRY_COST = 120
"""Approximate bytes of one entry of a vector of tables."""

LIST_COST = 56
"""Bytes of an empty list."""

SLOT_COST = 8
"""Bytes of one list entry."""

SHORT_LIST = 24
"""Valid files share lists of up to this length between many calls and tensors."""

LONG_ENTRY_COST = 64
"""Cost of each entry beyond ``SHORT_LIST``, per reference: otherwise a few long lists shared by
all calls would decode to dozens of entries per byte, all of which are iterated over.
"""

SHAPE_COST = 512
"""Approximate bytes of one checked vtable."""
