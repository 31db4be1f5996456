"""Cases in which the code differs from the contract until it is rewritten.

Each must pass at the end: delete its line then.
"""

from __future__ import annotations

_SUBMODULE_SIZES = "a submodule is held to conditions on sizes of its own"
_EXEC = "guards are made by exec, which dynamo refuses"

NEW_CONTRACT: dict[str, str] = {
    "test_zoo.py::test_calls[emformer-decomposed]": _SUBMODULE_SIZES,
    "test_zoo.py::test_exported_again[emformer]": _SUBMODULE_SIZES,
    "test_zoo.py::test_exported_again[lengthens]": _SUBMODULE_SIZES,
    "test_zoo.py::test_compiled[lengthens]": _EXEC,
    "test_zoo.py::test_compiled[reads numbers]": _EXEC,
    "test_zoo.py::test_exported_again[any rows]": "*args are exported again by name",
}
"""By test ID, why it fails."""
