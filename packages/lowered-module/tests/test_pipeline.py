"""``lower``: the whole way in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from lowered_helpers import calls_of, delegates
from torch import nn
from torch.fx import Node

from lowerdeck.decompose import decompose
from lowerdeck.emitter import EmitConfig, EmitterError, emit
from lowerdeck.lowered_module import (
    BackendNotFoundError,
    LoweredProgram,
    LoweringError,
    PartitionError,
    decomposed_for,
    lower,
    to_backend,
)
from lowerdeck.lowered_module.testing import RunPartitioner
from lowerdeck.serializer import Tensor, deserialize_pte
from lowerdeck_zoo import Holding, Of, exported

ATEN = torch.ops.aten
X = (torch.linspace(-2, 2, 8).reshape(2, 4),)
BRANCHING = Of(lambda x: x + 1 if x.sum() > 0 else x)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.first(x))
        return torch.softmax(self.last(hidden), -1)


class Encoder(nn.Module):
    def __init__(self, whole: Classifier) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.whole.first(x))


class Wanting(RunPartitioner):
    """Takes what it wants whole, and nothing else."""

    def __init__(self, operator: Any, which: Callable[[Node], bool] | None = None) -> None:
        super().__init__(lambda node: node.target is operator)
        self.whole = [operator]
        self.which = which
        self.asked = 0

    def ops_to_not_decompose(self, ep: Any) -> Any:
        del ep
        self.asked += 1
        return self.whole, self.which


def calls(lowered: LoweredProgram, method: str = "forward") -> list[str]:
    """Return the operators that a method's delegates compute, each delegate's in one text."""
    inner = [delegate.original_module for delegate in delegates(lowered.programs[method])]
    return [" ".join(str(node.target) for node in calls_of(one)) for one in inner]


def test_a_module_a_program_and_a_mapping_come_to_the_same_file() -> None:
    model = (Classifier().eval(), X)
    program = exported(*model[:1], *X)
    of_module = lower(model)
    assert of_module.to_bytes() == lower(program).to_bytes() == lower({"forward": model}).buffer
    assert of_module.methods == ("forward",)
    assert list(of_module.seconds) == ["export", "decompose", "lower", "emit"]
    assert isinstance(of_module, LoweredProgram)


def test_it_is_what_the_steps_by_hand_come_to(tmp_path: Any) -> None:
    program = exported(Classifier(), *X)
    before = str(program.graph_module.graph)
    partitioner = Wanting(ATEN.gelu.default)
    lowered = lower(program, partitioner)
    assert str(program.graph_module.graph) == before
    assert calls(lowered) == ["aten.gelu.default"]
    by_hand = to_backend(decompose(program, keep=[ATEN.gelu.default]), partitioner)
    assert emit(by_hand).to_bytes() == lowered.buffer
    torch.testing.assert_close(lowered.programs["forward"].module()(*X), program.module()(*X))
    size = lowered.save(tmp_path / "model.pte")
    assert (tmp_path / "model.pte").read_bytes() == lowered.buffer
    assert size == len(lowered.buffer)


def test_the_first_of_several_partitioners_chooses_first() -> None:
    program = exported(Classifier(), *X)
    everything = RunPartitioner(lambda node: "call_delegate" not in str(node.target))
    lowered = lower(program, [Wanting(ATEN.gelu.default), everything])
    assert calls(lowered).count("aten.gelu.default") == 1
    assert len(calls(lowered)) == 3
    assert not lowered.delegation().left
    alone = lower(program, [everything, Wanting(ATEN.gelu.default)])
    assert len(calls(alone)) == 1


def test_each_method_has_its_own_partitioners_and_shares_what_it_shares() -> None:
    whole = Classifier().eval()
    methods: dict[str, Any] = {"forward": (whole, X), "encode": (Encoder(whole).eval(), X)}
    lowered = lower(methods, {"encode": Wanting(ATEN.tanh.default)})
    assert lowered.methods == ("encode", "forward")
    assert calls(lowered) == []
    assert calls(lowered, "encode") == ["aten.tanh.default"]
    assert lowered.delegation("forward").delegates == {}
    assert lowered.delegation("encode").delegates == lowered.delegation().delegates
    both = lowered.delegation()
    left = lowered.delegation("forward").left
    # Without partitioners a method stays as exported until it is emitted.
    assert both.left["aten.linear.default"] == left["aten.linear.default"]
    assert both.left["aten.addmm.default"] == 1
    # One copy of the weights that both have.
    alone = lower({"forward": (whole, X)})
    assert len(lowered.program.constant_buffer) == len(alone.program.constant_buffer)
    for_all = lower(methods, Wanting(ATEN.gelu.default))
    assert calls(for_all) == ["aten.gelu.default"]
    assert calls(for_all, "encode") == []


def test_operators_stay_whole_for_those_who_asked_and_call_by_call() -> None:
    program = exported(Classifier(), *X)
    second = Wanting(ATEN.linear.default, lambda node: node.name == "linear_1")
    lowered = lower(program, second)
    assert second.asked == 1
    assert calls(lowered) == ["aten.linear.default"]
    assert lowered.delegation().left["aten.addmm.default"] == 1
    also = Wanting(ATEN.linear.default, lambda node: node.name == "linear")
    assert len(calls(lower(program, [second, also]))) == 2
    everyone = Wanting(ATEN.linear.default)
    assert len(calls(lower(program, [second, everyone]))) == 2


def test_a_volume_that_all_partitioners_leave_becomes_images() -> None:
    x = torch.randn(2, 3, 4, 8, 8)
    program = exported(torch.nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4)), x)
    leaving, other = Wanting(ATEN.conv3d.default, lambda _: False), Wanting(ATEN.linear.default)
    for partitioners, rank in ([leaving], 4), ([leaving, other], 5), ([other], 5):
        method = decomposed_for({"forward": partitioners}, {"forward": program})["forward"]
        (call,) = method.graph.find_nodes(op="call_function", target=ATEN.convolution.default)
        assert call.meta["val"].dim() == rank
        torch.testing.assert_close(method.module()(x), program.module()(x))


def test_partitioners_that_delegate_nothing_are_warned_of() -> None:
    program = exported(Classifier(), *X)
    with pytest.warns(UserWarning, match=r"nothing was delegated; print\(lowered.delegation"):
        lower(program, Wanting(ATEN.relu.default))


@pytest.mark.filterwarnings("ignore:nothing was delegated")
def test_a_view_that_is_wanted_whole_is_taken_apart_all_the_same() -> None:
    program = exported(Of(lambda x: x.reshape(-1).transpose(0, 0) + 1), *X)
    for which in (None, lambda node: True):
        for operator in (ATEN.reshape.default, ATEN.transpose.int):
            lowered = lower(program, Wanting(operator, which))
            assert torch.equal(lowered.programs["forward"].module()(*X), X[0].reshape(-1) + 1)


def test_settings_and_constant_methods_reach_the_file() -> None:
    model = (Classifier().eval(), X)
    config = EmitConfig(constant_methods={"get_bos": 1}, plan_inputs=False)
    lowered = lower(model, constant_methods={"get_vocab": 128}, config=config)
    assert lowered.methods == ("forward", "get_bos", "get_vocab")
    plans = deserialize_pte(lowered.buffer).execution_plan
    assert tuple(plan.name for plan in plans) == lowered.methods
    with pytest.raises(EmitterError):
        lower(model, constant_methods={"forward": 2})
    with pytest.raises(LoweringError, match="no lowered method 'get_bos'"):
        lowered.delegation("get_bos")


def test_bounds_give_the_file_of_a_program_with_maxima() -> None:
    def program(**limits: int) -> torch.export.ExportedProgram:
        batch = torch.export.Dim.AUTO(**limits) if limits else torch.export.Dim.AUTO
        return torch.export.export(Classifier(), X, dynamic_shapes=({0: batch},))

    taken = RunPartitioner(lambda node: node.target is ATEN.gelu.default)
    found = lower(program(), taken, bounds={"x_0": 16})
    assert found.buffer == lower(program(max=16), taken).buffer
    shapes = ({0: torch.export.Dim.AUTO(max=16)},)
    assert lower((Classifier(), X), taken, dynamic_shapes=shapes).buffer == found.buffer
    assert lower((Classifier(), X, {}), taken, dynamic_shapes=shapes).buffer == found.buffer
    assert found.delegation().delegates


def test_an_executor_and_a_cache_change_nothing(tmp_path: Any) -> None:
    model = (Classifier().eval(), X)
    plain = lower(model, Wanting(ATEN.gelu.default)).buffer
    seen = []
    with ThreadPoolExecutor(2) as executor:
        for _ in range(2):
            lowered = lower(
                model,
                Wanting(ATEN.gelu.default),
                executor=executor,
                cache=tmp_path,
                progress=lambda done, total, label: seen.append((done, total, label)),
            )
            assert lowered.buffer == plain
    assert seen == [(1, 1, "'run 1'")] * 2
    assert any(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")
def test_what_a_predicate_wants_whole_stays_whole_inside_recurrent_layers() -> None:
    linear, x = ATEN.linear.default, torch.randn(3, 1, 4)
    layers = {"layer": nn.LSTM(4, 4), "head": nn.Linear(4, 2, bias=False)}
    program = exported(Of(lambda self, x: self.head(self.layer(x)[0]), **layers), x)

    def has_bias(node: Node) -> bool:
        return len(node.args) == 3

    partitioner = Wanting(linear, has_bias)
    apart = decomposed_for({"forward": [partitioner]}, {"forward": program})["forward"]
    targets = [node.target for node in apart.graph.nodes]
    # One of all inputs and one of each step; the head has no bias and is taken apart.
    assert targets.count(linear) == 4
    assert ATEN.mm.default in targets
    torch.testing.assert_close(apart.module()(x), program.module()(x))
    whole = decomposed_for({"forward": [Wanting(linear)]}, {"forward": program})["forward"]
    assert [node.target for node in whole.graph.nodes].count(linear) == 5


class SaysTooLittle(RunPartitioner):
    def ops_to_not_decompose(self, ep: Any) -> Any:
        del ep


@pytest.mark.parametrize(
    ("programs", "partitioners", "error", "words"),
    [
        (
            Classifier(),
            None,
            LoweringError,
            "is a Classifier, expected an ExportedProgram, .module, example_args",
        ),
        (3, None, LoweringError, "method 'forward' is a int"),
        ((Classifier(), X, 3), None, LoweringError, r"is a \(Classifier, tuple, int\)"),
        (
            {"a": (BRANCHING, X)},
            None,
            LoweringError,
            r"(?s)torch.export cannot export method 'a'.*\n  The following call raised this error",
        ),
        ((Classifier(), X), "Nobody", BackendNotFoundError, "Nobody"),
        ((Classifier(), X), {"other": []}, LoweringError, "for methods other"),
        ((Classifier(), X), RunPartitioner, PartitionError, "the class RunPartitioner"),
        ((Classifier(), X), 3, PartitionError, "found a int as partitioner"),
        ((Classifier(), X), SaysTooLittle(lambda _: True), LoweringError, "ops_to_not_decompose"),
        (
            (Classifier(), X),
            Wanting(ATEN.gelu.default, True),  # type: ignore[arg-type]
            LoweringError,
            "the predicate is True",
        ),
        (
            (Classifier(), X),
            {"executor": 2},
            LoweringError,
            "executor: found a int, expected",
        ),
        ((Classifier(), X, {}, None), {"dynamic_shapes": {}}, LoweringError, "needs .module, a"),
        (
            (Classifier(), X),
            {"cache": 3},
            LoweringError,
            "cache: found a int, expected",
        ),
    ],
)
def test_what_cannot_be_lowered_is_one_error(
    programs: Any, partitioners: Any, error: type[Exception], words: str
) -> None:
    options: dict[str, Any] = {}
    if isinstance(partitioners, dict) and "other" not in partitioners:
        options, partitioners = partitioners, RunPartitioner(lambda _: True)
    with pytest.raises(error, match=words):
        lower(programs, partitioners, **options)


class Mixed(
    Holding,
    weight=lambda: nn.Parameter(torch.full((2,), 3.0)),
    offset=lambda: torch.full((2,), 5.0),
):
    """Reads inputs by position and by name, a parameter and a buffer, each with its own factor."""

    def forward(self, x: torch.Tensor, pair: list[torch.Tensor], *, y: torch.Tensor) -> Any:
        return x + 2 * pair[0] + 4 * pair[1] + 8 * y + 16 * self.weight + 32 * self.offset


@pytest.mark.parametrize("shared", ["one tensor", "parameter", "buffer", "two each"])
def test_an_input_that_is_also_another_input_or_a_weight_is_read(shared: str) -> None:
    runner = pytest.importorskip("lowerdeck.runner")
    module = Mixed()
    one, other = torch.ones(2), torch.zeros(2)
    x, first, second, y = {
        "one tensor": (one, one, one, one),
        "parameter": (module.weight, one, module.weight, other),
        "buffer": (other, module.offset, one, module.offset),
        "two each": (one, other, one, other),
    }[shared]
    lowered = lower((module, (x, [first, second]), {"y": y}))
    program = runner.load(lowered.to_bytes())
    given = [torch.randn(2) for _ in range(4)]
    wanted = module(given[0], given[1:3], y=given[3])
    torch.testing.assert_close(program.run("forward", given[0], given[1:3], y=given[3]), wanted)


def test_a_model_in_training_mode_is_lowered_as_it_is_with_a_warning() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    inputs = (torch.tensor([[1.0, 2.0], [3.0, 5.0]]),)
    with pytest.warns(UserWarning, match=r"'forward' is in training mode, .* call \.eval\(\)"):
        lower((model, inputs))
    assert model.training
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower((model.eval(), inputs))


def test_dynamic_shapes_follow_the_keyword_arguments_of_an_example() -> None:
    shapes = {"input": {0: torch.export.Dim("rows", max=8)}}
    model, rows = torch.nn.Linear(4, 2), (torch.ones(2, 4),)
    with pytest.raises(LoweringError, match="dynamic_shapes are the fourth element"):
        lower((model, rows, shapes))
    (plan,) = lower((model, rows, None, shapes)).program.execution_plan
    given = plan.values[plan.inputs[0]].val
    assert isinstance(given, Tensor)
    assert given.sizes == [8, 4]
