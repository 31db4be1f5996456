"""A backend of real speed on the host: partitions compiled to native code by torch's AOTInductor.

The blob is a line that says for which torch, which machine and instructions, and which inputs it
was compiled, and the package that AOTInductor made, weights included. It is code: whoever loads it
runs it. The runtime half therefore refuses every blob until it is told that the file comes from a
friend, by ``InductorRuntime(allow_native_code=True)`` or by the environment variable
``LOWERDECK_ALLOW_NATIVE_CODE=1``.
"""

from __future__ import annotations

import hashlib
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

from lowerdeck.demo_backends._torch_private import compile_package, load_package
from lowerdeck.demo_backends.errors import (
    BlobError,
    CompilerMissingError,
    DelegateInputError,
    DelegateRunError,
    NativeCodeError,
)
from lowerdeck.demo_backends.program_inputs import user_inputs
from lowerdeck.graph_fuser import propose_partitions
from lowerdeck.lowered_module import (
    BackendDetails,
    CompileSpec,
    DelegationSpec,
    Partitioner,
    PartitionResult,
    PreprocessResult,
    tag_constant_data,
)
from lowerdeck.serializer import CompileSpec as StoredSpec
from lowerdeck.torch_base import OpOverload, upper_bound

NAME = "InductorBackend"
VERSION = 2
_INPUT = re.compile(r"number|[a-z0-9_]{1,20}\[(<?[0-9]{1,18}(x<?[0-9]{1,18}){0,63})?\]")
ALLOW_NATIVE_CODE = "LOWERDECK_ALLOW_NATIVE_CODE"


class InductorPartitioner(Partitioner):
    """Gives every operator on tensors to the backend, in as few partitions as can be."""

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        """Return the program with a tag on each call of an operator that returns tensors."""
        tags = {}
        proposal = propose_partitions(
            exported_program.graph_module,
            lambda node: (
                isinstance(node.target, OpOverload)
                and not isinstance(
                    node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)
                )
            ),
        )
        for number, nodes in enumerate(proposal):
            tag = f"inductor_{number}"
            tags[tag] = DelegationSpec(NAME, [])
            for node in nodes:
                node.meta["delegation_tag"] = tag
        tag_constant_data(exported_program)
        return PartitionResult(exported_program, tags)


class InductorBackend(BackendDetails):
    """Compiles partitions to native code for this machine."""

    version: ClassVar[str] = (
        f"{VERSION} {torch.__version__} {platform.machine()} "
        f"{torch.backends.cpu.get_cpu_capability()}"
    )

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram,
        compile_specs: list[CompileSpec],  # noqa: ARG004  (there is nothing to set)
    ) -> PreprocessResult:
        """Return one partition as a package of native code.

        Args:
            edge_program: The partition.
            compile_specs: Not needed.

        Returns:
            The package, with its weights.

        Raises:
            CompilerMissingError: There is no C++ compiler.
            DemoBackendError: AOTInductor cannot compile the partition.
        """
        find_compiler()
        with tempfile.TemporaryDirectory() as folder:
            package = compile_package(edge_program, Path(folder) / "partition.pt2").read_bytes()
        inputs = ",".join(_described(node.meta.get("val")) for node in user_inputs(edge_program))
        return PreprocessResult(processed_bytes=_header(inputs, package) + package)


@dataclass(frozen=True, slots=True)
class LoadedPackage:
    """Native code, ready to be called.

    Attributes:
        call: Takes the inputs, returns the outputs.
        inputs: What each input must be, as ``float32[2x4]`` or ``float32[<8x4]``, where a size
            may be up to 8; ``number`` for a size.
    """

    call: Callable[..., Any]
    inputs: tuple[str, ...]


class InductorRuntime:
    """Loads and calls the packages of ``InductorBackend``.

    Args:
        allow_native_code: Whether to run code from the file; None asks the environment.
    """

    def __init__(self, allow_native_code: bool | None = None) -> None:
        if allow_native_code is None:
            allow_native_code = os.environ.get(ALLOW_NATIVE_CODE) == "1"
        self._allowed = allow_native_code

    def init(
        self,
        blob: memoryview,
        compile_specs: Sequence[StoredSpec],  # noqa: ARG002  (there is nothing to set)
        named_data: Mapping[str, memoryview],  # noqa: ARG002  (the package has its weights)
    ) -> LoadedPackage:
        """Return the code of a blob.

        Args:
            blob: What ``preprocess`` made.
            compile_specs: Not needed.
            named_data: Not needed.

        Returns:
            The handle that ``execute`` wants.

        Raises:
            BlobError: The blob is damaged, or was compiled for another torch or machine.
            NativeCodeError: Nobody has said that the file may be trusted.
        """
        inputs, package = _checked(bytes(blob))
        if not self._allowed:
            raise NativeCodeError(
                "the file holds native code, which can do whatever its maker wants. If you trust "
                "it, give load(..., backends={'InductorBackend': InductorRuntime("
                f"allow_native_code=True)}}) or set {ALLOW_NATIVE_CODE}=1"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "partition.pt2"
            path.write_bytes(package)
            try:
                call = load_package(path)
            except RuntimeError as error:
                raise BlobError(f"the package cannot be loaded: {error}") from error
        return LoadedPackage(call, inputs)

    def input_count(self, handle: LoadedPackage) -> int:
        """Return how many inputs the code takes."""
        return len(handle.inputs)

    def execute(self, handle: LoadedPackage, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for ``inputs``.

        Args:
            handle: What ``init`` returned.
            inputs: The inputs in order.

        Returns:
            New tensors, in order.

        Raises:
            DelegateInputError: Another number of inputs, or other ones, are needed.
            DelegateRunError: The code fails on these inputs.
        """
        if len(inputs) != len(handle.inputs):
            raise DelegateInputError(
                f"{len(handle.inputs)} inputs are needed, found {len(inputs)}"
            )
        for index, (given, wanted) in enumerate(zip(inputs, handle.inputs, strict=True)):
            # Native code reads the memory that it was compiled for, and looks at nothing.
            if not _fits(given, wanted):
                raise DelegateInputError(
                    f"input {index} must be a dense {wanted} on the CPU, found {_described(given)}"
                )
        try:
            returned = handle.call(*inputs)
        except RuntimeError as error:
            raise DelegateRunError(f"the compiled partition: {error}") from error
        return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def find_compiler() -> str:
    """Return the C++ compiler that AOTInductor will use.

    Returns:
        Its path.

    Raises:
        CompilerMissingError: There is none.
    """
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for name in wanted:
        found = shutil.which(name)
        if found:
            return found
    raise CompilerMissingError(
        f"InductorBackend needs a C++ compiler and found none of {', '.join(wanted)}: install one "
        "(apt-get install g++, dnf install gcc-c++, xcode-select --install), or point CXX to one"
    )


def _target() -> str:
    instructions = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
    return f"{torch.__version__} {platform.system()}-{platform.machine()}-{instructions}"


def _described(value: object) -> str:
    """Return a tensor's type and sizes in a word, a dynamic size by its upper bound."""
    if not isinstance(value, torch.Tensor):
        return "number"
    sizes = "x".join(
        str(size) if isinstance(size, int) else f"<{upper_bound(size)}" for size in value.shape
    )
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"


def _fits(given: object, wanted: str) -> bool:
    if not isinstance(given, torch.Tensor):
        return wanted == "number"
    dtype, _, sizes = wanted.rstrip("]").partition("[")
    bounds = sizes.split("x") if sizes else []
    return (
        str(given.dtype) == f"torch.{dtype}"
        and given.device.type == "cpu"
        and given.is_contiguous()
        and len(bounds) == given.dim()
        and all(
            size <= int(bound[1:]) if bound.startswith("<") else size == int(bound)
            for size, bound in zip(given.shape, bounds, strict=True)
        )
    )


def _header(inputs: str, package: bytes) -> bytes:
    digest = hashlib.sha256(package).hexdigest()
    return f"{NAME} {VERSION} {inputs or '-'} {digest} {_target()}\n".encode()


def _checked(blob: bytes) -> tuple[tuple[str, ...], bytes]:
    first, newline, package = blob.partition(b"\n")
    words = first.decode("ascii", "replace").split(" ", 4)
    if not newline or len(words) != 5 or words[0] != NAME:
        raise BlobError(f"a blob of {NAME} begins with that name; found {first[:60]!r}")
    if words[1] != str(VERSION):
        raise BlobError(f"the blob is of version {words[1][:20]!r}, this runtime reads {VERSION}")
    if words[4] != _target():
        raise BlobError(
            f"the blob was compiled for torch and machine {words[4][:60]!r}, here is "
            f"{_target()!r}: lower the model again here"
        )
    inputs = () if words[2] == "-" else tuple(words[2].split(","))
    wrong = [one for one in inputs if not _INPUT.fullmatch(one)]
    if wrong:
        raise BlobError(
            f"an input must be such as float32[2x4] or number, found {wrong[0][:20]!r}"
        )
    if hashlib.sha256(package).hexdigest() != words[3]:
        raise BlobError("the package's checksum is not what the first line says: truncated?")
    return inputs, package
