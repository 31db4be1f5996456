"""Limits on what a reader decodes, in proportion to the size of the file."""

from __future__ import annotations

MAX_TABLES = 1_000_000
"""The runtime's own check visits at most this many tables and refuses a program with more."""

MAX_RANK = 16
"""The runtime refuses tensors of more dimensions."""

MAX_TENSOR_BYTES = (1 << 63) - 1
"""The runtime counts bytes in 64 bits."""

MAX_PLANNED_MEMORY = 1 << 36
"""The runtime asks for planned memory before it runs anything; 64 GiB is surely a mistake."""

MAX_OPERATOR_NAME = 99
"""The runtime copies ``name.overload`` into 100 bytes, and crashes on a longer one."""

MEMORY_PER_BYTE = 256
"""A FlatBuffer may refer to one object many times, 4 bytes each. The decoded objects may
take this many times the FlatBuffer's size; valid files that share all that can be shared stay
below 160."""

FREE_MEMORY = 1 << 16
"""Decoded bytes allowed for any file, so that tiny files need no exact count."""

PREVIEW_BYTES = 4096
"""Bytes of a compile spec or blob that are shown; each reference to them costs as much."""

MAX_OVERLAP = 4
"""Segments, and constants within theirs, may together be this many times as long as the bytes
that they share. Ours reach 2: a constant that is a named blob or a delegate too."""

ENTRY_COST = 120
"""Bytes that one entry of a vector of tables takes, about."""

LIST_COST = 56
"""Bytes that an empty list takes."""

SLOT_COST = 8
"""Bytes that one entry of a list takes."""

SHORT_LIST = 24
"""Valid files share lists of up to this length between many calls and tensors."""

LONG_ENTRY_COST = 64
"""Cost of each entry past those, at each reference to the list: a few long lists that all calls
share would else unfold to dozens of entries per byte, all of which are iterated over."""

SHAPE_COST = 512
"""Bytes that one checked vtable takes, about."""
