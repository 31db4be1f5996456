"""All references to ExecuTorch's modules in this package.

Code that asks ``isinstance`` for a class of exir has imported the module that defines it, so that
looking whether it is loaded is enough; and it is looked each time that it is asked. Imported is
one module only, by ``new_record``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lowerdeck.exir_compat.errors import SettingError

_PROGRAMS = "executorch.exir.program._program"
_SCHEMA = "executorch.exir.schema"
_RECORDS = "executorch.devtools.etrecord"


def manager_class(name: str) -> Any:
    """Return the class of managers that exir has under a name, None where it is not loaded.

    Args:
        name: Of the class, such as ``EdgeProgramManager``.
    """
    return getattr(sys.modules.get(_PROGRAMS), name, None)


def file_classes() -> Any:
    """Return the module of the classes that exir's files are made of, None if not loaded."""
    return sys.modules.get(_SCHEMA)


def quantized_fusions() -> Any:
    """Return exir's pass that fuses quantised operators.

    Raises:
        SettingError: exir is not loaded.
    """
    try:
        return sys.modules[_PROGRAMS].quant_fusion_and_const_prop_pass
    except KeyError:
        raise SettingError(
            "ExecutorchBackendConfig.do_quant_fusion_and_const_prop is a pass of exir's, which is "
            "not loaded: import executorch.exir, or leave it out"
        ) from None


def is_exirs(kind: object) -> bool:
    """Return whether a class, a function or an object's class is defined in ExecuTorch.

    Args:
        kind: The class, the function or the object.
    """
    # Methods of built-in objects say None of their module.
    module = getattr(kind, "__module__", None) or ""
    return module.partition(".")[0] == "executorch"


def new_record() -> Any:
    """Return an empty record of ExecuTorch's devtools, for its Inspector.

    The one place of this package that imports ExecuTorch, whose class and file format it is; only
    who asks for ``generate_etrecord=True`` comes here.

    Raises:
        SettingError: The devtools are not installed.
    """
    try:
        return importlib.import_module(_RECORDS).ETRecord()
    except ImportError as error:
        raise SettingError(
            "generate_etrecord is True, and such a record is an object of executorch.devtools, "
            f"which cannot be imported: {error}; install executorch and pandas, or leave it out"
        ) from error
