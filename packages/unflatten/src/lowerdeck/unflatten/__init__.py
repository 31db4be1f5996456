"""Give an ExportedProgram its eager module hierarchy back."""

from lowerdeck.unflatten.errors import UnflattenError

__all__ = ["UnflattenError"]
