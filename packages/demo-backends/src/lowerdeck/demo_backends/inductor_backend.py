"""What one learns here: how a blob can be native code, and what a runtime half must then refuse.

Torch's AOTInductor compiles partitions, for real speed on the host. The blob says for which torch,
machine, instructions and inputs; the package follows, weights included. It is code: whoever loads
it runs it. The runtime half refuses every blob until it is told that the file comes from a friend,
by ``InductorRuntime(allow_native_code=True)`` or the variable ``LOWERDECK_ALLOW_NATIVE_CODE=1``.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from lowerdeck.demo_backends._torch_private import compile_package, load_package
from lowerdeck.demo_backends.errors import (
    BlobError,
    CompilerMissingError,
    DelegateInputError,
    DelegateRunError,
    NativeCodeError,
)
from lowerdeck.demo_backends.sealed import seal, unseal
from lowerdeck.demo_backends.text_format import kind_of
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    NodePartitioner,
    PartitionView,
    PreprocessResult,
    operator_name,
)
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.torch_base import OpOverload, upper_bound

NAME = "InductorBackend"
_INSTRUCTIONS = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
# Code for another torch or other instructions is of another version: unseal refuses it.
VERSION = f"3/{torch.__version__}/{platform.system()}-{platform.machine()}-{_INSTRUCTIONS}"
_INPUT = re.compile(r"number|[a-z0-9_]{1,20}\[(<?[0-9]{1,18}(x<?[0-9]{1,18}){0,63})?\]")


class InductorPartitioner(NodePartitioner):
    """Gives every operator on tensors to the backend, in as few partitions as can be."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def objection(self, node: Node) -> str | None:
        """Return None for each call of an operator that returns tensors."""
        number = isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))
        taken = isinstance(node.target, OpOverload) and not number
        return None if taken else f"{operator_name(node)} is no operator that returns tensors"


class InductorBackend(BackendDetails):
    """Compiles partitions to native code for this machine."""

    version: ClassVar[str] = VERSION

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Return one partition as a package; ``CompilerMissingError`` without a C++ compiler."""
        _require_compiler()
        with tempfile.TemporaryDirectory() as folder:
            package = compile_package(edge_program, Path(folder) / "partition.pt2").read_bytes()
        part = PartitionView(edge_program, compile_specs)
        inputs = " ".join(_described(node.meta["val"]) for node in part.inputs)
        return PreprocessResult(seal(NAME, VERSION, f"{inputs}\n".encode() + package))


@dataclass(frozen=True, slots=True)
class LoadedPackage:
    """Native code, ready to be called.

    Attributes:
        call: Takes the inputs, returns the outputs.
        inputs: What each must be: ``number``, ``float32[2x4]``, or ``float32[<8x4]`` for up to 8.
    """

    call: Callable[..., Any]
    inputs: Sequence[str]


class InductorRuntime:
    """Loads and calls the packages of ``InductorBackend``.

    Args:
        allow_native_code: Whether to run code from the file; None asks the environment.
    """

    def __init__(self, allow_native_code: bool | None = None) -> None:
        outside = os.environ.get("LOWERDECK_ALLOW_NATIVE_CODE") == "1"
        self._allowed = outside if allow_native_code is None else allow_native_code

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],  # noqa: ARG002  (there is nothing to set)
        named_data: Mapping[str, memoryview],  # noqa: ARG002  (the package has its weights)
    ) -> LoadedPackage:
        """Return the code of a blob.

        Raises:
            BlobError: The blob is damaged, or was compiled for another torch or machine.
            NativeCodeError: Nobody has said that the file may be trusted.
        """
        described, _, package = unseal(NAME, VERSION, bytes(blob)).partition(b"\n")
        inputs = described.decode("ascii", "replace").split()
        wrong = [one for one in inputs if not _INPUT.fullmatch(one)]
        if wrong:
            raise BlobError(f"an input must be such as float32[2x4], found {wrong[0][:20]!r}")
        if not self._allowed:
            raise NativeCodeError(
                "the file holds native code, which can do whatever its maker wants. If you trust "
                "it, give load(..., backends={'InductorBackend': InductorRuntime("
                "allow_native_code=True)}) or set LOWERDECK_ALLOW_NATIVE_CODE=1"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "partition.pt2"
            path.write_bytes(package)
            try:
                return LoadedPackage(load_package(path), inputs)
            except RuntimeError as error:
                raise BlobError(f"the package cannot be loaded: {error}") from error

    def input_count(self, handle: LoadedPackage) -> int:
        """Return how many inputs the code takes."""
        return len(handle.inputs)

    def execute(self, handle: LoadedPackage, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Raises:
            DelegateInputError: Another number of inputs, or other ones, are needed.
            DelegateRunError: The code fails on these inputs.
        """
        if len(inputs) != len(handle.inputs):
            raise DelegateInputError(f"{len(handle.inputs)} inputs, found {len(inputs)}")
        for index, (given, wanted) in enumerate(zip(inputs, handle.inputs, strict=True)):
            # Native code reads the memory that it was compiled for, and looks at nothing.
            if not _fits(given, wanted):
                raise DelegateInputError(
                    f"input {index} must be a dense {wanted} on the CPU, found {_described(given)}"
                )
        try:
            found = handle.call(*inputs)
        except RuntimeError as error:
            raise DelegateRunError(f"the compiled partition: {error}") from error
        return [found] if isinstance(found, torch.Tensor) else list(found)


def _require_compiler() -> None:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    if not any(map(shutil.which, wanted)):
        raise CompilerMissingError(
            f"AOTInductor needs a C++ compiler and found none of {', '.join(wanted)}: install one "
            "(apt-get install g++, dnf install gcc-c++, xcode-select --install), or set CXX"
        )


def _described(value: object) -> str:
    """Return a tensor's type and sizes in a word, a dynamic size by its upper bound."""
    if not isinstance(value, torch.Tensor):
        return kind_of(value)
    sizes = (str(one) if isinstance(one, int) else f"<{upper_bound(one)}" for one in value.shape)
    return f"{kind_of(value)}[{'x'.join(sizes)}]"


def _fits(given: object, wanted: str) -> bool:
    kind, _, sizes = wanted.rstrip("]").partition("[")
    if not isinstance(given, torch.Tensor) or kind_of(given) != kind:
        return kind_of(given) == kind
    bounds = [one.rpartition("<") for one in sizes.split("x") if one]
    return (
        given.device.type == "cpu"
        and given.is_contiguous()
        and len(bounds) == given.dim()
        and all(
            size <= int(bound) if up_to else size == int(bound)
            for size, (_, up_to, bound) in zip(given.shape, bounds, strict=True)
        )
    )
