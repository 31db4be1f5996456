"""exir's settings of the way from exported programs to Edge programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowerdeck.torch_base import OpOverload


@dataclass(slots=True)
class EdgeCompileConfig:
    """Settings of :func:`to_edge`, under the names that exir gives them.

    Programs are lowered and emitted in torch's operators, so that there is nothing to check of
    the Edge dialect and nothing to except from the check; no operator of dimension orders comes
    up. After an import of that dialect (``executorch.exir``) programs are shown in it.

    Attributes:
        preserve_ops: Operators that stay whole.
        _check_ir_validity: Nothing here depends on it: what cannot be emitted is always an error.
        _skip_dim_order: Nothing here depends on it.
        _use_edge_ops: False shows programs in torch's operators whatever has been imported.
        _core_aten_ops_exception_list: Nothing here depends on it.
    """

    _check_ir_validity: bool = True
    _skip_dim_order: bool = False
    _core_aten_ops_exception_list: Sequence[OpOverload] = field(default_factory=list)
    preserve_ops: Sequence[OpOverload] = field(default_factory=list)
    _use_edge_ops: bool = True
