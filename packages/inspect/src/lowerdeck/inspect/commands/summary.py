"""The summary of a file that ``lowerdeck inspect`` prints, as plain data.

Scripts rely on the keys of :func:`summarise`: new versions may add keys, but never rename one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lowerdeck import serializer as schema
from lowerdeck.inspect.report.delegates import spec_text
from lowerdeck.inspect.report.file_map import placement_of
from lowerdeck.inspect.report.lifetimes import callee, steps
from lowerdeck.inspect.report.operators import Contents, contents_of
from lowerdeck.inspect.report.values import dtype_name, value_text
from lowerdeck.serializer import DataLocation, PteFile, storage_size

SUMMARY_VERSION = 1


def summarise(file: PteFile) -> dict[str, Any]:
    """Return a JSON-compatible summary of a file.

    Returns:
        ``summary_version``, ``size``, ``version``, ``program_size``, ``header``, ``methods``,
        ``kernel_libraries``, ``needs`` (the oldest release of ExecuTorch that loads the file, if
        1.4 does not), ``delegates``, ``constants``, ``state``, ``named_data`` and ``sections``.
        Sizes are in bytes.

    Raises:
        FormatError: The file is malformed.
    """
    methods = [_method(plan) for plan in file.program().execution_plan]
    delegates, needs = _delegates(file)
    return {
        "summary_version": SUMMARY_VERSION,
        "size": len(file.data),
        "version": file.version,
        "program_size": file.program_size,
        "header": None if file.header is None else asdict(file.header),
        "methods": methods,
        "kernel_libraries": libraries_of(
            name for method in methods for name in method["operators"]
        ),
        "needs": needs,
        "delegates": delegates,
        "constants": _stored(file.constants),
        "state": _stored(file.mutable_data),
        "named_data": [
            {"key": item.key, "size": storage_size(item.data)} for item in file.named_data
        ],
        "sections": [
            {"kind": s.kind, "label": s.label, "offset": s.offset, "size": s.nbytes}
            for s in sorted(placement_of(file).sections, key=lambda s: (s.offset, -s.nbytes))
        ],
    }


def _delegates(file: PteFile) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """Return the delegates, and the oldest ExecuTorch release that loads them, if 1.4 does not."""
    # Bytes shared by several delegates are read once.
    seen: dict[tuple[DataLocation, int, str], Contents] = {}
    entries = []
    for entry in file.delegates:
        place = entry.location, entry.index, entry.id
        if place not in seen:
            seen[place] = contents_of(entry.data, entry.id)
        entries.append(
            {
                "method": entry.method,
                "id": entry.id,
                "location": entry.location.name,
                "size": len(entry.data),
                "compile_specs": {spec.key: spec_text(spec) for spec in entry.compile_specs},
                "payload": _payload(seen[place]),
                "closed": seen[place].closed,
            }
        )
    needed = [payload.needs for payload in seen.values() if payload.needs is not None]
    needs = {"release": needed[0][0], "reason": needed[0][1]} if needed else None
    return entries, needs


def _payload(contents: Contents) -> dict[str, Any] | None:
    if contents.closed:
        return None
    return {
        "operators": contents.operators,
        "constant_bytes": contents.constant_bytes,
        "nodes": list(contents.lines),
        "nodes_left_out": contents.left_out,
    }


def _method(plan: schema.ExecutionPlan) -> dict[str, Any]:
    kinds = Counter(type(step).__name__ for step in steps(plan))
    calls = Counter(
        callee(plan, step) for step in steps(plan) if isinstance(step, schema.KernelCall)
    )
    return {
        "name": plan.name,
        "inputs": [_value(plan, index) for index in plan.inputs],
        "outputs": [_value(plan, index) for index in plan.outputs],
        "values": len(plan.values),
        "instructions": dict(sorted(kinds.items())),
        "operators": dict(sorted(calls.items(), key=lambda item: (-item[1], item[0]))),
        "planned_memory": [
            {"id": index, "size": size}
            for index, size in enumerate(plan.non_const_buffer_sizes)
            if index
        ],
    }


def _value(plan: schema.ExecutionPlan, index: int) -> dict[str, Any]:
    if not 0 <= index < len(plan.values):
        return {"kind": "missing", "text": f"value {index}, which does not exist"}
    value = plan.values[index].val
    entry: dict[str, Any] = {"kind": type(value).__name__, "text": value_text(value, plan.values)}
    if isinstance(value, schema.Tensor):
        entry |= {
            "dtype": dtype_name(value.scalar_type),
            "sizes": list(value.sizes),
            "dim_order": list(value.dim_order),
            "shape": value.shape_dynamism.name,
        }
    return entry


def _stored(buffers: list[schema.Buffer]) -> dict[str, int]:
    real = buffers[1:]
    return {"count": len(real), "size": sum(storage_size(buffer.storage) for buffer in real)}


_ALWAYS = frozenset({"aten", "dim_order_ops", "executorch_prim"})
"""Namespaces of ExecuTorch's portable and built-in kernels."""

_LIBRARIES = {"llama": "custom_ops", "quantized_decomposed": "quantized_ops_lib"}
"""Library of a namespace, by its name in ExecuTorch's build."""

_OWN = "the application's own"


def libraries_of(operators: Iterable[str]) -> dict[str, list[str]]:
    """Return the kernel libraries that operators need beyond the runtime, with their operators.

    Args:
        operators: Names such as ``"aten::add.out"``.

    Example:
        >>> libraries_of(["aten::add.out", "llama::custom_sdpa.out", "mine::twice.out"])
        {'custom_ops': ['llama::custom_sdpa.out'], "the application's own": ['mine::twice.out']}
    """
    libraries: dict[str, list[str]] = {}
    for operator in sorted(set(operators)):
        namespace = operator.partition("::")[0]
        if namespace not in _ALWAYS:
            libraries.setdefault(_LIBRARIES.get(namespace, _OWN), []).append(operator)
    return libraries
