"""exir's settings of ``to_edge``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowerdeck.torch_base import OpOverload


@dataclass(slots=True)
class EdgeCompileConfig:
    """Settings of :func:`to_edge`, with exir's names.

    Programs are lowered and emitted in ATen operators, so there are no Edge dialect checks and no
    dim-order operators. If the Edge dialect (``executorch.exir``) has been imported, managers
    return programs in that dialect.

    Attributes:
        preserve_ops: Operators that are not decomposed.
        _check_ir_validity: Ignored.
        _skip_dim_order: Ignored.
        _use_edge_ops: If False, managers return programs in ATen operators.
        _core_aten_ops_exception_list: Ignored.
    """

    _check_ir_validity: bool = True
    _skip_dim_order: bool = False
    _core_aten_ops_exception_list: Sequence[OpOverload] = field(default_factory=list)
    preserve_ops: Sequence[OpOverload] = field(default_factory=list)
    _use_edge_ops: bool = True
