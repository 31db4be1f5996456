"""The door to ExecuTorch's own runtime, for packages that run files in it where it is installed.

The one place of the packages with torch that loads ``executorch``, and only when it is asked to.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

_PACKAGE = "executorch.extension.pybindings"
_OPENVINO = "OPENVINO_LIB_PATH"


def has_official_runtime() -> bool:
    """Return whether ExecuTorch's runtime is installed, without loading it.

    Example:
        >>> from lowerdeck.torch_base import has_official_runtime
        >>> isinstance(has_official_runtime(), bool)
        True
    """
    try:
        return importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        return False


def official_binding() -> dict[str, Any]:
    """Return what ExecuTorch's binding of its runtime offers, by name, OpenVINO's library found.

    Import it in a process of its own: the runtime ends its process over some files, and its
    operators are torch's from then on. The names in it are private, and all that there is. The
    module that ExecuTorch shows its users (``portable_lib``) imports all of exir for the class of
    one warning: 6 s in place of 0.2 s, and nothing at all where a dependency of exir is missing.

    Raises:
        ModuleNotFoundError: It is not installed.

    Example:
        >>> from lowerdeck.torch_base import official_binding
        >>> load = official_binding()["_load_for_executorch"]  # doctest: +SKIP
    """
    if sys.platform == "win32":
        # There that module also tells where the binding's own libraries lie.
        return vars(importlib.import_module(f"{_PACKAGE}.portable_lib"))
    if library := _openvino_library():
        os.environ.setdefault(_OPENVINO, str(library))
    name = "_portable_lib"
    if importlib.util.find_spec(f"{_PACKAGE}.{name}") is None:
        name = "_C"  # its name from 1.5 on
    return vars(importlib.import_module(f"{_PACKAGE}.{name}"))


def _openvino_library() -> Path | None:
    """Return where OpenVINO's C library lies, which its backend loads when it is first asked."""
    found = importlib.util.find_spec("openvino")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in sorted(Path(folder, "libs").glob("libopenvino_c.*")):
            return library
    return None
