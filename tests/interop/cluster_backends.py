"""Backends for workers of a cluster, which import them by name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch.export import ExportedProgram

from lowerdeck.lowered_module import BackendDetails, CompileSpec, PreprocessResult
from lowerdeck.lowered_module.testing import VerbatimBackend


class Noting(BackendDetails):
    """Notes each call in the folder that its compile spec names: which process began it."""

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        folder = Path(os.fsdecode(compile_specs[0].value))
        tempfile.mkstemp(prefix=f"{os.getpid()}.", dir=folder)
        return VerbatimBackend.preprocess(edge_program, compile_specs)
