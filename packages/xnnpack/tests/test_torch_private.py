"""What this package expects of torch's private parts."""

from __future__ import annotations

import torch

from lowerdeck.xnnpack._torch_private import OpOverload, is_mutable, returns_alias, schema_of

_aten = torch.ops.aten


def test_schemas_tell_names_and_defaults() -> None:
    assert isinstance(_aten.softmax.int, OpOverload)
    assert not isinstance(_aten.softmax, OpOverload)
    arguments = schema_of(_aten.add.Tensor).arguments
    assert [(one.name, one.default_value) for one in arguments] == [
        ("self", None),
        ("other", None),
        ("alpha", 1),
    ]


def test_schemas_tell_writes_and_aliases() -> None:
    assert is_mutable(_aten.relu_.default)
    assert not is_mutable(_aten.relu.default)
    assert returns_alias(_aten.view.default)
    assert not returns_alias(_aten.relu_.default)
    assert not returns_alias(_aten.add.Tensor)
