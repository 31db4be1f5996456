"""Libraries with kernels that are not part of every runtime."""

from __future__ import annotations

from collections.abc import Iterable

ALWAYS = frozenset({"aten", "dim_order_ops", "executorch_prim"})
"""Namespaces with kernels in every runtime, portable or built in."""

LIBRARIES = {"llama": "custom_ops", "quantized_decomposed": "quantized_ops_lib"}
"""Library of a namespace, by its name in ExecuTorch's build."""

OWN = "the application's own"


def libraries_of(operators: Iterable[str]) -> dict[str, list[str]]:
    """Return the libraries that operators need beside the runtime, with their operators.

    Args:
        operators: Names such as ``"aten::add.out"``.

    Example:
        >>> libraries_of(["aten::add.out", "llama::custom_sdpa.out", "mine::twice.out"])
        {'custom_ops': ['llama::custom_sdpa.out'], "the application's own": ['mine::twice.out']}
    """
    libraries: dict[str, list[str]] = {}
    for operator in sorted(set(operators)):
        namespace = operator.partition("::")[0]
        if namespace not in ALWAYS:
            libraries.setdefault(LIBRARIES.get(namespace, OWN), []).append(operator)
    return libraries
