"""The module that calls a delegate."""

from lowerdeck.lowered_module.delegate.calling_convention import CallingConvention, flatten_program
from lowerdeck.lowered_module.delegate.module import LoweredBackendModule

__all__ = ["CallingConvention", "LoweredBackendModule", "flatten_program"]
