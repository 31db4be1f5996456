"""Arguments by the names of the schema, as torch itself would fill them in."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.nn import functional

from lowerdeck.torch_base import arguments_of, schema_of
from lowerdeck_zoo import Of, exported


def call(function: Any, *inputs: torch.Tensor) -> Node:
    """Return the last call of an operator in what export makes of a function."""

    nodes = exported(Of(function), *inputs).graph.nodes
    calls: list[Node] = [node for node in nodes if node.op == "call_function"]
    return calls[-1]


IMAGE, WEIGHT = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 2, 2)


@pytest.mark.parametrize(
    "function",
    [
        torch.conv2d,
        lambda x, w: torch.conv2d(x, w, None, 2),
        lambda x, w: functional.conv2d(x, w, stride=[2], padding=(1, 0)),
        lambda x, w: functional.conv2d(x, w, padding="valid"),
        lambda x, w: functional.max_pool2d(x, 2, padding=1) + w.sum(),
        lambda x, _: functional.avg_pool2d(x, (2, 1)),
        lambda x, _: x.sum(1),
        lambda x, _: torch.add(x, x, alpha=2),
        lambda x, _: functional.gelu(x, approximate="tanh"),
        lambda x, _: torch.clamp(x, max=3),
    ],
)
def test_calling_with_all_arguments_by_name_computes_the_same(function: Any) -> None:
    node = call(function, IMAGE, WEIGHT)
    found = arguments_of(node)
    assert list(found) == [one.name for one in schema_of(node.target).arguments]  # type: ignore[arg-type]
    values = {IMAGE.shape: IMAGE, WEIGHT.shape: WEIGHT}

    def computed(node: Any) -> Any:
        if not isinstance(node, Node):
            return node
        if node.op == "placeholder":
            return values[node.meta["val"].shape]
        return node.target(**{k: computed(v) for k, v in arguments_of(node).items()})  # type: ignore[operator]

    torch.testing.assert_close(computed(node), function(IMAGE, WEIGHT))


def test_one_number_that_means_several_is_written_out() -> None:
    found = arguments_of(call(lambda x, w: functional.conv2d(x, w, stride=[2]), IMAGE, WEIGHT))
    assert found["stride"] == [2, 2]
    assert found["padding"] == [0, 0]
    assert found["bias"] is None
    assert arguments_of(call(lambda x: x.sum(1), IMAGE))["dim"] == [1]


def test_what_is_filled_in_cannot_be_changed_for_others() -> None:
    node = call(torch.conv2d, IMAGE, WEIGHT)
    with pytest.raises(TypeError):
        arguments_of(node)["dilation"].append(3)
    arguments_of(node).clear()
    assert arguments_of(node)["dilation"] == [1, 1]


def test_what_has_no_schema_has_no_named_arguments() -> None:
    graph = Graph()
    given = graph.placeholder("x")
    assert arguments_of(given) == {}
    assert arguments_of(graph.call_function(operator.getitem, (given, 0))) == {}
