"""The kernels that a program may call.

The capabilities of the official runtime's kernels are data of ``lowerdeck.serializer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lowerdeck.serializer import RUNTIME_VERSION, runtime_kernels


@dataclass(frozen=True, slots=True, repr=False)
class KernelTable:
    """Full names of the kernels that a program may call.

    The sets of operators hold names without namespace and overload, such as ``"add"``.

    Attributes:
        names: Full names, such as ``"aten::add.out"``; an operator without overload has no dot.
        channels_last: Operators whose kernels take channels-last tensors.
        channels_last_alike: Operators whose kernels take channels-last tensors if all of them have
            the same shape.
        in_place_safe: Operators whose output may alias an input of equal dtype, shape and layout.
        writes_into_self: Operators whose output may alias their first argument.
        first_out_in_place: Operators with several outputs, of which the first may alias the first
            argument.
        version: The runtime version that the table was read from.
        complex_numbers: Operators whose kernels take complex tensors.
    """

    names: frozenset[str]
    channels_last: frozenset[str]
    channels_last_alike: frozenset[str]
    in_place_safe: frozenset[str]
    writes_into_self: frozenset[str]
    first_out_in_place: frozenset[str]
    version: str = RUNTIME_VERSION
    complex_numbers: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """Return the version and the number of kernels; their names are in ``names``."""
        return f"<KernelTable of runtime {self.version}, {len(self.names)} kernels>"

    def __contains__(self, full_name: object) -> bool:
        is_custom = self.is_open and not str(full_name).startswith("aten::")
        return full_name in self.names or is_custom

    @property
    def is_open(self) -> bool:
        """Return whether all out-variants outside of ATen may be called."""
        return "*" in self.names

    def with_kernels(self, names: Iterable[str]) -> KernelTable:
        """Return this table with custom kernels added.

        Args:
            names: Full names of out-variant kernels that the target's runtime registers, such as
                ``"mylib::fused_gelu.out"``; ``"*"`` allows all outside of ATen.
        """
        return replace(self, names=self.names | frozenset(names))


def _operators(word: str) -> frozenset[str]:
    return frozenset(
        kernel.operator for kernel in runtime_kernels().values() if word in kernel.words
    )


OFFICIAL_KERNELS = KernelTable(
    names=frozenset(runtime_kernels()),
    channels_last=_operators("channels_last"),
    channels_last_alike=_operators("channels_last_alike"),
    in_place_safe=_operators("in_place"),
    writes_into_self=_operators("into_self"),
    first_out_in_place=_operators("first_in_place"),
    complex_numbers=_operators("complex"),
)
"""The kernels that the official runtime registers."""
