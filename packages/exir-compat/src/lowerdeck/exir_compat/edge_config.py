"""What callers of exir say about the way from exported programs to Edge programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowerdeck.torch_base import OpOverload


@dataclass(slots=True)
class EdgeCompileConfig:
    """Settings of :func:`to_edge`, under the names that exir gives them.

    There is no Edge dialect here, so that there is nothing to check of it and nothing to except
    from the check; operators stay torch's, and no operator of dimension orders comes up.

    Attributes:
        preserve_ops: Operators that stay whole.
        _check_ir_validity: Nothing here depends on it: what cannot be emitted is always told.
        _skip_dim_order: Nothing here depends on it.
        _core_aten_ops_exception_list: Nothing here depends on it.
    """

    _check_ir_validity: bool = True
    _skip_dim_order: bool = False
    _core_aten_ops_exception_list: Sequence[OpOverload] = field(default_factory=list)
    preserve_ops: Sequence[OpOverload] = field(default_factory=list)
