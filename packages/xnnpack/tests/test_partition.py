"""What the XNNPACK partitioner takes, what it leaves and why."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from case_making import Function  # type: ignore[import-not-found]
from torch import fx, nn
from torch.export import Dim
from xnnpack_lowering import delegates, labels, lower, named_data, run, whole  # type: ignore[import-not-found]

from lowerdeck.lowered_module import (
    MethodProgramsPartitionerSpec,
    PreprocessError,
    get_lowered_backend_modules,
    to_backend,
)
from lowerdeck.lowered_module import lower as lower_whole
from lowerdeck.xnnpack import UnsupportedNodeError, XnnpackBackend, XnnpackPartitioner
from lowerdeck.xnnpack.operators.table import refusal
from lowerdeck_zoo import Holding, Of

# torch's own, from copying a tree spec inside run_decompositions
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning")


def refused(function: Callable[..., Any], *inputs: torch.Tensor) -> str:
    """Return why nodes of a function were refused."""
    partitioner = XnnpackPartitioner()
    lower(Function(function), inputs, partitioner)
    return "; ".join(partitioner.refused.values())


X = torch.randn(2, 3, 4, 5)
W3 = torch.ones(2, 3, 2, 2, 2)
MANY = torch.zeros(65, dtype=torch.int64)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.cumsum(x, 0), "no such operator"),
        (lambda x: x.masked_fill(x > 0, -1.0), "no select op"),
        (lambda x: torch.where(x > 0, x, x + 1), "no select op"),
        (lambda x: torch.where(x[:1] > 0, x[:1], torch.full((2, 3, 4, 5), -1e9)), "no select op"),
        (lambda x: F.avg_pool3d(x[None], 2), "no such operator"),
        (lambda x: F.adaptive_avg_pool3d(x[None], 2), "not the whole volume"),
        (lambda x: F.max_pool3d(x[None], (2, 1, 1), (2, 1, 3)), "windows of one element"),
        (lambda x: F.max_pool3d(x, 2), "with a batch, 5 are needed"),
        (lambda x: F.conv2d(x[0], W3[:, :, 0]), "3 dimensions; 4 are needed"),
        (lambda x: F.conv_transpose3d(x[None], W3), "no such operator"),
        (lambda x: F.conv3d(x[None], x[None, :, :, :2]), "not constant"),
        (lambda x: torch.relu(x.double()), "float64"),
        (lambda x: x * (x > 0), "bool"),
        (lambda x: torch.relu(x[:0]), "empty"),
        (lambda x: x.reshape(1, 1, 2, 3, 4, 5)[..., ::2], "n-th element"),
        (lambda x: F.pad(x, (-5, 1)), "removes all elements"),
        (lambda x: torch.pow(x, 1.7), "exponent"),
        (lambda x: F.avg_pool2d(x, 3, divisor_override=7), "not the number of elements"),
        (lambda x: F.adaptive_avg_pool2d(x, 3), "not all of one size"),
        (lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), "not an integer"),
        (lambda x: F.conv2d(x, x[:, :, :2, :2]), "not constant"),
        (lambda x: F.max_pool2d(x[0], 2), "4 dimensions"),
        (lambda x: x.reshape(1, 1, 1, 2, 3, 4, 5) * 2, "6 are allowed"),
        (lambda x: torch.addmm(x[0, 0], x[0, 1, :, :4], x[0, 2]), "not a single row"),
        (lambda x: torch.ops.aten.elu(x, 1.0, 1.0, -0.5), "exponent is not positive"),
        (lambda x: x.var(1, correction=3), "divisor is not positive"),
        (lambda x: torch.relu(x[..., MANY]), "more than 64 indices"),
    ],
)
def test_what_the_runtime_lacks_or_computes_otherwise_is_left_with_a_reason(
    function: Callable[..., Any], reason: str
) -> None:
    assert any(part in refused(function, X) for part in reason.split("|"))


def test_a_write_in_place_that_others_would_see_is_not_lost() -> None:
    def aliased(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        y.view(-1).add_(1)
        return y

    program = torch.export.export(Function(aliased), (X,))
    lowered = to_backend(program, XnnpackPartitioner())
    assert get_lowered_backend_modules(lowered.graph_module)
    torch.testing.assert_close(lowered.module()(X), aliased(X))


class TwoWays(Holding, layer=lambda: nn.Linear(5, 5)):
    """Something unsupported between two parts that share a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(torch.cumsum(self.layer(x), 0))
        return y


def test_a_weight_of_two_partitions_is_constant_in_both_under_one_key() -> None:
    first, second = delegates(lower(TwoWays(), (X,), XnnpackPartitioner()))
    assert set(named_data(first)) == set(named_data(second))
    assert len(named_data(first)) == 2


def test_a_partition_that_computes_nothing_is_left() -> None:
    program = lower(Function(lambda x: torch.cumsum(x, 0).view(-1)), (X,), XnnpackPartitioner())
    assert not delegates(program)


def test_an_unsupported_node_in_preprocess_is_named() -> None:
    program = torch.export.export(Function(lambda x: torch.cumsum(x, 0)), (X,))
    with pytest.raises(UnsupportedNodeError, match=r"aten\.cumsum\.default.*'cumsum'.*\.py:\d+"):
        XnnpackBackend.preprocess(program, [])
    with pytest.raises(PreprocessError, match="cumsum"):
        to_backend("XnnpackBackend", program, [])


def test_positions_that_calls_outside_read_are_left_to_the_emitter() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(5.0).mul(2).exp()
        return torch.atan2(x * positions, positions) * 2

    partitioner = XnnpackPartitioner()
    lowered = lower(Function(model), (X,), partitioner)
    assert "depends on no input" in partitioner.refused["exp"]
    assert [labels(delegate) for delegate in delegates(lowered)] == [["Multiply"], ["Multiply"]]


def test_only_readers_of_lost_constants_are_checked_again_and_keep_their_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The permuted channels of pytorchcv's CondenseNet.
    indices = torch.randperm(80)
    checked: list[str] = []

    def counted(node: fx.Node, *args: Any) -> str | None:
        checked.append(node.name)
        return refusal(node, *args)

    monkeypatch.setattr("lowerdeck.xnnpack.compile.partitioner.refusal", counted)
    partitioner = XnnpackPartitioner()
    model = Function(lambda x: x.relu().index_select(1, indices.detach().clone()).relu() * 2)
    lower(model, (torch.randn(2, 80),), partitioner)
    assert "selects more than 64" in partitioner.refused["index_select"]
    # Again, because its index is no longer constant.
    assert checked.count("index_select") == 2
    assert checked.count("relu") == checked.count("mul") == 1


def test_a_batch_norm_that_updates_statistics_is_refused() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    program = torch.export.export(layers, (X,)).run_decompositions()
    partitioner = XnnpackPartitioner()
    to_backend(program, partitioner)
    assert any("batch_norm" in name for name in partitioner.refused)


def test_each_node_of_the_payload_maps_to_the_nodes_it_came_from() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    (delegate,) = delegates(lower(Function(lambda x, net: net(x), layers), (X,)))
    handles = delegate.meta["debug_handle_map"]
    assert any(len(one) == 3 for one in handles.values())


def test_a_number_that_is_known_only_at_run_time_is_left_to_the_portable_kernels() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(
        Function(lambda x: (x * 2).relu() / x.shape[0]), (X,), dynamic_shapes=(({0: batch},),)
    ).run_decompositions()
    partitioner = XnnpackPartitioner()
    lowered = to_backend(program, partitioner)
    assert any("not a constant number" in reason for reason in partitioner.refused.values())
    other = torch.randn(5, 3, 4, 5)
    torch.testing.assert_close(lowered.module()(other), (other * 2).relu() / 5)


def test_inputs_of_a_size_that_nothing_bounds_are_taken() -> None:
    # What the positions of a Hugging Face decoder can be: the runtime sees it with each call.
    def masked(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        number: Any = count.item()
        return (torch.arange(number).float() * 2).exp().sum() + x

    program = lower(Function(masked), (torch.randn(3), torch.tensor(4)))
    assert delegates(program)


def test_branches_are_left_with_the_reason() -> None:
    model = Of(lambda x: torch.cond(x.sum() > 0, torch.tanh, torch.neg, (x + 1,)))
    partitioner = XnnpackPartitioner()
    to_backend(torch.export.export(model, (torch.ones(3),)), partitioner)
    assert "contains subgraphs" in partitioner.refused["cond"]


@pytest.mark.parametrize("functional", [False, True])
def test_weights_that_another_method_changes_are_no_constants(functional: bool) -> None:
    weight = torch.rand(4, 3, 3, 3)
    run = Of(lambda self, x: F.conv2d(x, self.weight) * 2, weight=weight)
    train_on = Of(lambda self, x: self.weight.add_(x) * 2, weight=weight)
    programs = {
        "run": torch.export.export(run, (torch.rand(1, 3, 8, 8),)),
        "train_on": torch.export.export(train_on, (torch.rand(1),)),
    }
    if functional:
        programs = {name: each.run_decompositions({}) for name, each in programs.items()}
    partitioners = {name: XnnpackPartitioner() for name in programs}
    lowered: Any = to_backend(MethodProgramsPartitionerSpec(programs, partitioners))
    assert ["not constant" in why for why in partitioners["run"].refused.values()] == [True]
    for name in programs:
        assert len(delegates(lowered[name])) == 1


# Exponentials and squares exceed float16 where the result does not: eager computes them wider.
HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: (x / 100).softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x / 100, -1),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "rms_norm": lambda x: F.rms_norm(x, (64,)),
    "group_norm": lambda x: F.group_norm(x, 1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: (x / 8).sum(-1),
    "var": lambda x: (x / 8).var(-1),
    "std": lambda x: x.std(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x / 100, x / 100, x),
}


@pytest.mark.parametrize("name", HALVES)
def test_what_sums_on_halves_is_computed_in_float32(name: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 3, 64) * 100 + 900).half()
    delegate = whole(lower(Function(HALVES[name]), (x,)))
    (found,) = run(delegate, (x,))
    exact = HALVES[name](x.float())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), exact, rtol=4e-3, atol=2e-2)


def test_a_cache_keeps_the_results_of_releases_apart() -> None:
    assert XnnpackBackend.version == metadata.version("lowerdeck-xnnpack")


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_bias_of_one_element_is_added_to_each_output(decomposed: bool) -> None:
    def linear(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    model, x = Of(linear, weight=torch.randn(5, 4), bias=torch.randn(1)), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    program = program.run_decompositions() if decomposed else program
    lowered = to_backend(program, XnnpackPartitioner())
    torch.testing.assert_close(lowered.module()(x), model(x))


def _experts(x: torch.Tensor, count: torch.Tensor) -> Any:
    sizes: Any = count.tolist()
    for size in sizes:
        torch._check(size >= 0)  # type: ignore[no-untyped-call]
    torch._check(sizes[0] + sizes[1] == x.shape[0])  # type: ignore[no-untyped-call]
    first, second = torch.split(x, sizes)
    return torch.relu(first) * 2, second.sigmoid() * 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_split_by_sizes_from_data_is_delegated(dynamic: bool) -> None:
    """As in JetMoe."""
    program = torch.export.export(
        Of(_experts),
        (torch.randn(6, 4), torch.tensor([2, 4])),
        dynamic_shapes=(({0: Dim.AUTO(max=16)}, None),) if dynamic else None,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    lowered = to_backend(program, XnnpackPartitioner())
    assert get_lowered_backend_modules(lowered.graph_module)
    for rows, first in ((6, 1), (6, 5), *(((9, 3),) if dynamic else ())):
        inputs = torch.randn(rows, 4), torch.tensor([first, rows - first])
        torch.testing.assert_close(tuple(lowered.module()(*inputs)), _experts(*inputs))


def test_patches_of_videos_of_any_length_are_delegated() -> None:
    """As in VideoMAE."""
    patches = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    tokens = Function(lambda x: patches(x.transpose(1, 2)).flatten(2).transpose(1, 2).relu())
    dims = (({0: Dim.AUTO(max=4), 1: Dim.AUTO(max=16)},),)
    lowered = lower_whole(
        (tokens, (torch.randn(2, 6, 3, 8, 8),)), XnnpackPartitioner(), dynamic_shapes=dims
    )
    program = lowered.programs["forward"]
    assert lowered.delegation().left.keys() <= {
        "aten.slice.Tensor",
        "aten.view.default",
        "aten.clone.default",
    }
    for frames in (6, 9):
        x = torch.randn(3, frames, 3, 8, 8)
        torch.testing.assert_close(program.module()(x), tokens(x), atol=1e-4, rtol=1e-4)
