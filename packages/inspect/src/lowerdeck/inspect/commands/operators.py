"""``lowerdeck ops FILE``: the operators that a runtime must link to run a `.pte` file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lowerdeck.inspect.commands.answers import ExitStatus, reading, say
from lowerdeck.serializer import (
    ExecutionPlan,
    KernelCall,
    OptionalTensorList,
    Program,
    Tensor,
    TensorList,
    open_pte,
    verify_pte,
)

_ENTRY = {
    "include_all_overloads": False,
    "is_root_operator": True,
    "is_used_for_training": True,
}


class OperatorsCommand:
    """Lists operators with the argument types of their calls, also for selective builds."""

    help = "list the operators that a .pte file calls"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("file", type=Path, metavar="FILE", help="a .pte file")
        parser.add_argument(
            "--yaml",
            action="store_true",
            help="print selected_operators.yaml for ExecuTorch's selective build",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the operators.

        Raises:
            CommandError: The file cannot be read, or is invalid.
        """
        with reading(args.file), open_pte(args.file) as file:
            # Indices are valid only in a verified file.
            kernels = operator_kernels(verify_pte(file.data))
        lines = selective_build_lines(kernels, str(args.file)) if args.yaml else _lines(kernels)
        say(*lines)
        return ExitStatus.DONE


def operator_kernels(program: Program) -> dict[str, list[str]]:
    """Return the operators of all methods with the types and dimension orders of their tensors.

    Returns:
        The sorted keys of ExecuTorch's selective build, by full name of the operator, such as
        ``aten::add.out``. A key is ``v1/`` and the type number and dimension order of each tensor
        argument (of a list, its first tensor), or ``v1`` without tensors. An operator that is
        never called has no keys.
    """
    kernels: dict[str, set[str]] = {}
    for plan in program.execution_plan:
        names = [operator.full_name for operator in plan.operators]
        for name in names:
            kernels.setdefault(name, set())
        for chain in plan.chains:
            for instruction in chain.instructions:
                call = instruction.instr_args
                if isinstance(call, KernelCall):
                    kernels[names[call.op_index]].add(_key(plan, call.args))
    return {name: sorted(keys) for name, keys in sorted(kernels.items())}


def _key(plan: ExecutionPlan, arguments: Sequence[int]) -> str:
    tensors = filter(None, (_tensor(plan, index) for index in arguments))
    parts = (f"{int(item.scalar_type)};{','.join(map(str, item.dim_order))}" for item in tensors)
    return f"v1/{'|'.join(parts)}".rstrip("/")


def _tensor(plan: ExecutionPlan, index: int) -> Tensor | None:
    """Return a tensor argument, or the first tensor of a list argument; None for other kinds."""
    value = plan.values[index].val
    if isinstance(value, TensorList | OptionalTensorList):
        items = [plan.values[item].val for item in value.items if item >= 0]
        return next((item for item in items if isinstance(item, Tensor)), None)
    return value if isinstance(value, Tensor) else None


def selective_build_lines(kernels: Mapping[str, Sequence[str]], model: str) -> list[str]:
    """Return the lines of the YAML file for ExecuTorch's selective build.

    Args:
        model: Name of the model, recorded as the source of the operators.
    """
    build = {
        "build_features": [],
        "custom_classes": [],
        "et_kernel_metadata": {name: keys for name, keys in kernels.items() if keys},
        "include_all_non_op_selectives": False,
        "include_all_operators": False,
        "kernel_metadata": {},
        "operators": {name: {"debug_info": [model], **_ENTRY} for name in kernels},
    }
    # Strings from the file are untrusted; JSON, which is valid YAML, escapes them.
    return json.dumps(build, indent=2).splitlines()


def _lines(kernels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for name, keys in kernels.items():
        yield json.dumps(name)[1:-1]
        yield from (f"  {key}" for key in keys)


command: OperatorsCommand = OperatorsCommand()
