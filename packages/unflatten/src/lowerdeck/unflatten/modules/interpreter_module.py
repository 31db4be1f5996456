"""The modules that replace eager's submodules."""

from __future__ import annotations

import torch

from lowerdeck.unflatten.modules.container import child_at
from lowerdeck.unflatten.modules.generated_module import GeneratedModule
from lowerdeck.unflatten.modules.readable import print_readable


class InterpreterModule(GeneratedModule):
    """One submodule of the eager hierarchy, running the code of its own graph.

    The name is torch's; nothing is interpreted here. Parameters, buffers and children are eager's.
    """

    def __getitem__(self, key: int | str) -> torch.nn.Module:
        return child_at(self, key)

    def print_readable(
        self,
        print_output: bool = True,
        include_stride: bool = False,  # noqa: ARG002
        include_device: bool = False,  # noqa: ARG002
        colored: bool = False,  # noqa: ARG002
    ) -> str:
        """Return the code of this module and of all below it; print it too unless told otherwise.

        Args:
            print_output: Whether to print.
            include_stride: Accepted for torch's sake; strides are not shown.
            include_device: Accepted for torch's sake; devices are not shown.
            colored: Accepted for torch's sake; the text is plain.
        """
        return print_readable(self, "InterpreterModule", print_output)
