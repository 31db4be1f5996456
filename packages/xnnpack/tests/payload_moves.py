"""A check of every payload that a suite compiles."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lowerdeck.serializer import decode_payload
from lowerdeck.xnnpack import XnnpackBackend

MOVES = {"StaticReshape", "StaticSlice", "StaticTranspose"}


@pytest.fixture(autouse=True, scope="session")
def payloads_have_no_mergeable_moves() -> Iterator[None]:
    """Check every payload that a test compiles: merging moves at load may crash the runtime."""
    compiled = XnnpackBackend.preprocess

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = compiled(*args, **kwargs)
        graph = decode_payload(result.processed_bytes)
        made = {value: node for node in graph.nodes for value in node.outputs}
        readers = Counter(value for node in graph.nodes for value in node.inputs)
        moves = [node for node in graph.nodes if node.operator.label in MOVES]
        for node in moves:
            before = made.get(node.inputs[0])
            alone = readers[node.inputs[0]] == 1
            assert not (alone and before and before.operator is node.operator), node
        keys = [(one.operator, one.inputs, *sorted(one.parameters.items())) for one in moves]
        assert len(keys) == len({*keys}), keys
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(XnnpackBackend, "preprocess", staticmethod(checked))
        yield
