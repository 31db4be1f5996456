"""Delegates that the official runtime runs only with other data or in a newer release."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from lowerdeck.serializer.xnnpack.graph import XnnGraph
from lowerdeck.serializer.xnnpack.moves import mergeable_move
from lowerdeck.serializer.xnnpack.verify_types import needed_release


@dataclass(frozen=True, slots=True)
class Hazard:
    """A delegate in a valid file that may end the runtime's process when it is loaded.

    Attributes:
        reason: The data that are missing, the nodes or the release.
        field: The delegate.
        offset: Where it is in the file.
        needs: Keys of data that must come with another file, or the process ends.
        release: The oldest release of ExecuTorch that loads the file, if 1.4 does not.
    """

    reason: str
    field: str
    offset: int
    needs: tuple[str, ...] = ()
    release: str = ""

    def __str__(self) -> str:
        """Return it in the form of this package's errors."""
        return f"{self.field} at byte {self.offset}: {self.reason}"


def missing_data(
    keys: Sequence[str], named: Container[str], field: str, offset: int
) -> Hazard | None:
    """Return the hazard of a delegate whose data are not all in the file, else None.

    The runtime looks them up when it loads the method, and its process ends if one is missing.

    Args:
        keys: The keys that a payload of XNNPACK reads.
        named: Those of the file.
        field: The delegate.
        offset: Where it is in the file.
    """
    needs = tuple(dict.fromkeys(key for key in keys if key not in named))
    if not needs:
        return None
    more = f" and {len(needs) - 1} more" if len(needs) > 1 else ""
    return Hazard(
        f"needs the data {needs[0]!r}{more} from a .ptd file, without which the process ends",
        field,
        offset,
        needs,
    )


def merged_moves(payload: XnnGraph, field: str, offset: int) -> Hazard | None:
    """Return the hazard of a delegate whose moves of bytes the runtime merges when it loads it.

    Args:
        payload: What XNNPACK runs.
        field: The delegate.
        offset: Where it is in the file.
    """
    node = mergeable_move(payload)
    if node is None:
        return None
    return Hazard(
        f"has two {node.operator.label} nodes of which one reads the other alone, or that are "
        "equal: merging them at load may end the process of executorch 1.4.1",
        field,
        offset,
    )


def newer_release(payload: XnnGraph, field: str, offset: int) -> Hazard | None:
    """Return the hazard of a delegate that ExecuTorch 1.4 refuses to load and a newer one runs.

    Args:
        payload: What XNNPACK runs.
        field: The delegate.
        offset: Where it is in the file.
    """
    needed = needed_release(payload)
    if needed is None:
        return None
    release, what = needed
    return Hazard(
        f"needs ExecuTorch {release} or later: {what} is refused by 1.4 when the file is loaded",
        field,
        offset,
        release=release,
    )
