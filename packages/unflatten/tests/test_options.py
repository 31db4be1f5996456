"""Options of unflatten, what can be read of its modules, and edits of their graphs."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export
from unflatten_zoo import CASES  # type: ignore[import-not-found]
from unflatten_zoo.judges import Around, compare_calls, recorded, run  # type: ignore[import-not-found]
from unflatten_zoo.models import layers  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    InterpreterModule,
    UnsupportedProgramError,
    export_preserving,
    unflatten,
)

BY_NAME = {str(case): case for case in CASES}
X = torch.linspace(-1, 1, 8).view(2, 4)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_parameters_are_called_and_default_as_torchs() -> None:
    theirs = inspect.signature(torch.export.unflatten).parameters
    mine = inspect.signature(unflatten).parameters
    assert list(mine)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (mine[name].default, mine[name].kind) == (parameter.default, parameter.kind)


def test_functional_graphs_stay_functional() -> None:
    case = BY_NAME["counts thrice"]
    module = case.unflattened("functional")
    for inner in module.modules():
        for node in getattr(inner, "graph", torch.fx.Graph()).nodes:
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable
    compare_calls(case, module)


RESTORED = {
    "containers": ("named.b", "named.a.1x"),
    "bare layers": ("linear", "conv", "norm", "bare", "batch"),
    "counts thrice": ("counter", "layer"),
    "transformer": ("embedding", "blocks.0.norm", "blocks.1.attention", "head"),
}


@pytest.mark.parametrize("name", RESTORED)
@pytest.mark.parametrize("with_eager", [False, True])
def test_children_get_their_eager_types(name: str, with_eager: bool) -> None:
    case = BY_NAME[name]
    eager = case.module()
    made: Any = unflatten(case.program(), restore_types=eager if with_eager else True)
    for path in RESTORED[name]:
        found, module = made.get_submodule(path), eager.get_submodule(path)
        assert isinstance(found, type(module))
        for attribute in ("bias", "weight"):
            # Code asks for what a layer is made without: quantisation for linear.bias.
            if getattr(module, attribute, 1) is None:
                assert getattr(found, attribute, 1) is None
    for subject in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made):
        compare_calls(case, subject)
        repr(subject)


@pytest.mark.parametrize(
    "name", ["transformer", "optional arguments", "experts", "blocks", "any rows", "shared"]
)
def test_children_with_flat_signatures_are_called_alone(name: str) -> None:
    """With ``preserve="all"`` they take values in the order of their first use."""
    case = BY_NAME[name]
    made = case.unflattened("flat")
    assert all(row.callable_alone for row in made.swappable() if row.called), made.swappable()
    paths = [row.path for row in made.swappable() if row.called]
    for inputs in case.calls():
        with recorded(made, paths) as log:
            run(made, inputs)
        calls = [entry for entry in log if len(entry) == 3]
        assert not any(kwargs for _, _, kwargs in calls)
        for path, args, _ in calls:
            result = next(entry[1] for entry in log if entry[0] == path and len(entry) == 2)
            if len([entry for entry in calls if entry[0] == path]) > 1:
                continue
            found = made.get_submodule(path)(*args)
            torch.testing.assert_close(found, result, msg=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preserve": "some"}, "preserve='all' or None; found 'some'"),
        ({"restore_types": 3}, "expected restore_types to be"),
        ({"restore_types": nn.Linear}, "expected restore_types to be"),
    ],
)
def test_other_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=message):
        unflatten(export(nn.ReLU(), (X,)), **options)


def test_a_strict_export_is_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match="found strict=True"):
        export_preserving(pair(), (X,), strict=True)


@pytest.mark.parametrize("wrong", [nn.ReLU(), None])
def test_no_program_is_refused(wrong: Any) -> None:
    with pytest.raises(
        UnsupportedProgramError, match=r"expected an ExportedProgram; found a .*\."
    ):
        unflatten(wrong)


def test_the_program_is_left_alone_and_let_go() -> None:
    eager: Any = BY_NAME["counts thrice"].module()
    x = torch.randn(2, 2)
    program = export(eager, (x,))
    before = (str(program.graph), str(program.graph_signature), dict(program.graph_module.meta))
    values = {name: value.clone() for name, value in program.state_dict.items()}
    module = unflatten(program)
    module(x)
    assert (
        str(program.graph),
        str(program.graph_signature),
        dict(program.graph_module.meta),
    ) == before
    for name, value in values.items():
        torch.testing.assert_close(program.state_dict[name], value)
    assert eager.counter.count == 0
    alive = weakref.ref(program)
    del program
    gc.collect()
    assert alive() is None


def test_the_tree_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    module: Any = unflatten(export(nn.Sequential(pair(), nn.BatchNorm1d(4)), (X,)))
    assert capsys.readouterr() == ("", "")
    text = module.print_readable(print_output=False)
    assert capsys.readouterr().out == ""
    assert "1: torch.nn.modules.batchnorm.BatchNorm1d" in text
    assert module.print_readable() + "\n" == capsys.readouterr().out
    first = module.get_submodule("0.0")
    assert isinstance(first, InterpreterModule)
    assert first.type_name() == "torch.nn.modules.linear.Linear"
    assert first.code.splitlines()[1].strip() in text


def test_an_edited_graph_takes_effect_after_recompile() -> None:
    eager = pair()
    module: Any = unflatten(export(eager, (X,)))
    relu = module.get_submodule("1")
    (node,) = relu.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    node.target = torch.ops.aten.tanh.default
    torch.testing.assert_close(module(X), eager(X))
    relu.recompile()
    torch.testing.assert_close(module(X), eager[0](X).tanh())


def test_the_whole_trains() -> None:
    eager = layers.Residual()
    module = unflatten(export(eager, (X,)))
    for subject in (eager, module):
        optimizer = torch.optim.SGD(subject.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            subject(X).pow(2).sum().backward()
            optimizer.step()
    for name, value in eager.named_parameters():
        torch.testing.assert_close(module.get_parameter(name), value)


def test_a_compiled_child_inside_an_uncompiled_parent() -> None:
    torch._dynamo.reset()
    eager = nn.Sequential(pair(), nn.Linear(4, 2))
    module: Any = unflatten(export(eager, (X,)))
    module.get_submodule("0").compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(module(X), eager(X))
    module = unflatten(export_preserving(eager, (X,)))
    module.set_submodule("0", Around(module.get_submodule("0")))
    module.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(module(X), eager(X))
