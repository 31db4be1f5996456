"""Turn an ExportedProgram into a Program that the official ExecuTorch runtime runs."""

from lowerdeck.emitter.errors import EmitterError

__all__ = ["EmitterError"]
