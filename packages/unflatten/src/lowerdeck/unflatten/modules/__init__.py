"""The modules that come out."""

from lowerdeck.unflatten.modules.assembly import (
    build_hierarchy,
    install_state,
    note_uncalled,
    share,
)
from lowerdeck.unflatten.modules.bodies import BodyMaker
from lowerdeck.unflatten.modules.changes import watch_all
from lowerdeck.unflatten.modules.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.modules.eager_types import ModuleFactory, replace_children, restore
from lowerdeck.unflatten.modules.generated_module import Body, shadow_own_names
from lowerdeck.unflatten.modules.interpreter_module import InterpreterModule
from lowerdeck.unflatten.modules.swap_table import NOT_REPLACEABLE, SUPPOSED_ONE, Swap, SwapTable
from lowerdeck.unflatten.modules.unflattened_module import UnflattenedModule

__all__ = [
    "NOT_REPLACEABLE",
    "SUPPOSED_ONE",
    "Body",
    "BodyMaker",
    "InterpreterModule",
    "InterpreterModuleDispatcher",
    "ModuleFactory",
    "Swap",
    "SwapTable",
    "UnflattenedModule",
    "build_hierarchy",
    "install_state",
    "note_uncalled",
    "replace_children",
    "restore",
    "shadow_own_names",
    "share",
    "watch_all",
]
