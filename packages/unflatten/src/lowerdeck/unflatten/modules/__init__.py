"""The modules that ``unflatten`` returns."""

from lowerdeck.unflatten.modules.container import Container
from lowerdeck.unflatten.modules.dispatcher import InterpreterModuleDispatcher
from lowerdeck.unflatten.modules.module import InterpreterModule
from lowerdeck.unflatten.modules.root import UnflattenedModule

__all__ = [
    "Container",
    "InterpreterModule",
    "InterpreterModuleDispatcher",
    "UnflattenedModule",
]
