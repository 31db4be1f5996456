"""Lower parts of an ExportedProgram to compiler backends."""

from lowerdeck.lowered_module.errors import LoweringError

__all__ = ["LoweringError"]
