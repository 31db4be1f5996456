"""Generated code: the operators that it runs, what modules share, the lines that it names."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from unflatten_zoo.judges import Around  # type: ignore[import-not-found]
from unflatten_zoo.models import layers  # type: ignore[import-not-found]

from lowerdeck.unflatten import InputConstraintError, export_preserving, unflatten

X = torch.rand(2, 4) / 2 + 0.25
IMAGE = torch.rand(1, 2, 5, 5)

UNARY = (
    "abs acos asin atan ceil clone cos cosh erf exp expm1 floor isfinite isinf isnan log log10 "
    "log1p log2 logical_not neg reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square tan "
    "tanh"
)
BINARY = "add sub mul div eq ne lt le gt ge"
MORE_BINARY = "atan2 maximum minimum logical_and logical_or"
# Arguments of the operators that take more than one or two tensors.
OPERATORS: dict[str, tuple[Any, ...]] = {
    "linear": (X, torch.rand(3, 4), torch.rand(3)),
    "gelu": (X,),
    "silu": (X,),
    "scaled_dot_product_attention": (torch.rand(1, 2, 3, 4),) * 3,
    "view": (X, [4, 2]),
    "expand": (X, [3, 2, 4]),
    "matmul": (X, X.t()),
    "mm": (X, X.t()),
    "bmm": (X[None], X.t()[None]),
    "addmm": (torch.rand(2), X, X.t()),
    "layer_norm": (X, [4], torch.ones(4), torch.zeros(4), 1e-5, True),
    "group_norm": (X, 2, torch.ones(4), torch.zeros(4), 1e-5, True),
    "rms_norm": (X, [4], torch.ones(4)),
    "embedding": (X, torch.tensor([1, 0])),
    "dropout": (X, 0.5, False),
    "batch_norm": (X, None, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5, False),
    "transpose.int": (X, 0, 1),
    "permute": (X, [1, 0]),
    "t": (X,),
    "reshape": (X, [8]),
    "unsqueeze": (X, 0),
    "squeeze.dim": (X[None], 0),
    "cat": ([X, X], 1),
    "stack": ([X, X], 0),
    "flatten.using_ints": (X, 0, 1),
    "select.int": (X, 0, 1),
    "slice.Tensor": (X, 0, 0, 1),
    "narrow": (X, 1, 0, 2),
    "chunk": (X, 2, 1),
    "split_with_sizes": (X, [1, 3], 1),
    "where.self": (X > 0.5, X, X + 1),
    "softmax.int": (X, 1),
    "log_softmax.int": (X, 1),
    "mean.dim": (X, [1], True),
    "sum.dim_IntList": (X, [1], True),
    "index_select": (X, 1, torch.tensor([0])),
    "gather": (X, 1, torch.tensor([[0], [1]])),
    "cumsum": (X, 1),
    "sort": (X, 1),
    "conv1d": (IMAGE[0], torch.rand(3, 5, 2), None, [1], [0], [1], 1),
    "conv2d": (IMAGE, torch.rand(3, 2, 2, 2), torch.rand(3), [1, 1], [1, 1], [1, 1], 1),
    "conv3d": (IMAGE, torch.rand(3, 1, 1, 2, 2), None, [1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    "repeat_interleave.self_int": (X, 2, 1),
    "masked_fill.Scalar": (X, X > 0.5, 0.0),
    "masked_fill.Tensor": (X, X > 0.5, torch.zeros(())),
    "tril": (X,),
    "triu": (X, 1),
    **{f"{name}.Tensor": (X, X.flip(0)) for name in BINARY.split()},
    **{f"{name}.Scalar": (X, 0.5) for name in BINARY.split() if name not in {"sub", "div"}},
    **{name: (X, X.flip(0)) for name in MORE_BINARY.split()},
    **dict.fromkeys(UNARY.split(), (X,)),
}
KEYWORDS: dict[str, dict[str, Any]] = {
    "add.Tensor": {"alpha": 2},
    "gelu": {"approximate": "tanh"},
    "softmax.int": {"dtype": torch.float64},
    "sum.dim_IntList": {"dtype": torch.float64},
    "clone": {"memory_format": torch.contiguous_format},
}


class Runs(nn.Module):
    """Runs one operator on the tensors that it is given."""

    def __init__(self, target: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.target, self.args, self.kwargs = target, args, kwargs

    def forward(self, *tensors: Tensor) -> Any:
        feed = iter(tensors)
        return self.target(*_filled(self.args, feed), **self.kwargs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in parts for tensor in _tensors(item)]


def _filled(value: Any, feed: Any) -> Any:
    if isinstance(value, Tensor):
        return next(feed)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, feed) for item in value)
    return value


def _calls(program: torch.export.ExportedProgram) -> list[Any]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return [(node.target, str(node.args), str(node.kwargs)) for node in nodes]


@pytest.mark.parametrize("name", [*OPERATORS, *(f"{name}, keyword" for name in KEYWORDS)])
def test_code_runs_the_very_operator(name: str) -> None:
    """Whatever function it calls, an export of the code has the operator again."""
    base, _, keyword = name.partition(", ")
    packet, _, overload = base.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload or "default")
    args = OPERATORS[base]
    eager = Runs(target, args, KEYWORDS[base] if keyword else {})
    tensors = tuple(_tensors(args))
    program = export(eager, tensors)
    made = unflatten(program)
    torch.testing.assert_close(made(*tensors), eager(*tensors))
    assert _calls(export(made, tensors)) == _calls(program)


def test_modules_of_equal_code_share_it_and_others_do_not() -> None:
    eager = layers.Slopes()
    x = torch.randn(3, 2)
    module: Any = unflatten(export(eager, (x,)))
    blocks = list(module.blocks.children())
    codes = [block.forward.__func__ for block in blocks]
    assert codes[0] is codes[2]
    assert len({id(code) for code in codes}) == 4
    # What they share is the code, not the graph.
    first, _, third, *_ = blocks
    mul = next(n for n in first.graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    mul.args = (mul.args[0], 2.0)
    first.recompile()
    torch.testing.assert_close(first(x), first.fc(x) * 2 + x)
    torch.testing.assert_close(third(x), eager.blocks[2](x))


@pytest.mark.parametrize("record", [export, export_preserving])
def test_tools_that_replace_the_call_of_modules_see_each_call(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls of unchanged children skip it."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    module, seen = unflatten(record(model, (X,))), list[nn.Module]()
    call = nn.Module.__call__

    def watched(self: nn.Module, *args: Any) -> Any:
        seen.append(self)
        return call(self, *args)

    monkeypatch.setattr(nn.Module, "__call__", watched)
    torch.testing.assert_close(module(X), model(X))
    assert seen == [*module.modules(), *model.modules()]


def test_calls_of_children_ask_no_module_for_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch looks a name up in three places, which costs as much as half an operator.
    eager, x = nn.Sequential(nn.Sequential(nn.Tanh(), nn.ReLU()), nn.Tanh()), torch.randn(2, 4)
    made, wanted = unflatten(export_preserving(eager, (x,))), eager(x)
    asked: list[str] = []
    own = nn.Module.__getattr__

    def counting(self: nn.Module, name: str) -> Any:
        asked.append(name)
        return own(self, name)

    made(x)
    monkeypatch.setattr(nn.Module, "__getattr__", counting)
    result = made(x)
    assert not asked
    monkeypatch.undo()
    torch.testing.assert_close(result, wanted)


class Inner(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.relu(self.inner(x, index))


def line_of(cls: type, text: str) -> str:
    lines, start = inspect.getsourcelines(cls)
    number = next(start + index for index, line in enumerate(lines) if text in line)
    return f"test_code.py:{number} in forward: "


def test_an_operator_that_fails_names_the_line_of_the_model() -> None:
    made = unflatten(export(Outer(), (torch.ones(3, 2), torch.tensor([1]))))
    with pytest.raises(IndexError, match="out of range") as failed:
        made(torch.ones(3, 2), torch.tensor([7]))
    message = str(failed.value)
    line = line_of(Inner, "index_select")
    assert f"{line}return x.index_select(0, index)" in message
    assert message.count("test_code.py") == 1
    with pytest.raises(InputConstraintError) as refused:
        made(torch.ones(4, 2), torch.tensor([1]))
    assert "test_code.py" not in str(refused.value)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Outer(), nn.Tanh()])

    def forward(self, x: Tensor, index: Tensor) -> Any:
        return self.blocks[1](self.blocks[0](x, index))


def test_calls_of_children_are_shown_as_the_model_writes_them() -> None:
    made: Any = unflatten(export(Blocks(), (torch.ones(3, 2), torch.tensor([1]))))
    assert "self.blocks[0](x, index)" in made.code
    inner = made.get_submodule("blocks.0").code
    assert "inner = self.inner(x, x_1)  # " in inner
    assert line_of(Outer, "self.inner(x") in inner


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: float) -> Tensor:
        result: Tensor = self.work(x) * times if times > 0.2 else self.work(x) + 1
        return result


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = Scales()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.block(self.step(self.step(x, 0.5), 0.1))


@pytest.mark.parametrize("record", [export, export_preserving])
@pytest.mark.parametrize("how", ["whole", "specialization", "wrapped"])
def test_the_line_is_named_however_the_module_is_called(record: Any, how: str) -> None:
    x = torch.ones(2, 4)
    made: Any = unflatten(record(Whole(), (x,)))
    made.step.work.weight = nn.Parameter(torch.ones(4, 5))
    subject, args = made, (x,)
    if how == "specialization":
        subject = made.step.call_modules()[0]
        args = (x, 0.5) if record is export_preserving else (x,)  # type: ignore[assignment]
    if how == "wrapped":
        if record is export:
            return
        made.step = Around(made.step)
    with pytest.raises(RuntimeError) as failed:
        subject(*args)
    message = str(failed.value)
    # Torch's own line, and that of the model which calls it.
    assert "linear.py:" in message
    assert message.count(line_of(Scales, "self.work(x) * times")) == 1


_PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from unflatten_zoo import OWN_CASES
for case in OWN_CASES[::40]:
    for way in ("plain", "decomposed", "preserving"):
        if case.lacks(way):
            continue
        module = case.unflattened(way)
        print(list(module.state_dict()), module.swappable())
        for name, inner in module.named_modules():
            print(name, type(inner).__name__, getattr(inner, "code", ""))
            for node in inner.graph.nodes if hasattr(inner, "graph") else ():
                target = getattr(node.target, "__name__", node.target)
                print(node.op, node.name, target, [str(user) for user in node.users])
"""


def test_code_and_graphs_are_equal_under_every_hash_seed() -> None:
    outputs = set()
    for seed in ("0", "4242"):
        made = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(Path(__file__).parent)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert made.returncode == 0, made.stderr[-3000:]
        outputs.add(made.stdout)
    assert len(outputs) == 1
    assert "def forward" in outputs.pop()


def _uncalled() -> tuple[Any, Any, Tensor]:
    """Return eager, its unflattened module before the first call, and an input."""
    eager, x = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.ReLU()), -torch.ones(2)
    return eager, unflatten(export(eager, (x,))), x


def _pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled])
def test_copies_before_the_first_call_run_their_own_graphs(copied: Any) -> None:
    eager, module, x = _uncalled()
    assert list(inspect.signature(module.forward).parameters) == ["input"]
    other = copied(module)
    last = list(module.graph.find_nodes(op="call_module"))[-1]
    last.replace_all_uses_with(last.args[0])
    module.graph.erase_node(last)
    module.recompile()
    torch.testing.assert_close(other(x), eager(x))
    torch.testing.assert_close(module(x), eager[0](x))


def test_threads_make_the_first_call_together() -> None:
    eager, module, x = _uncalled()
    barrier = threading.Barrier(8)

    def run(_: int) -> Tensor:
        barrier.wait()
        return module(x)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(run, range(8)):
            torch.testing.assert_close(result, eager(x))


def test_a_compiler_makes_the_first_call() -> None:
    eager, module, x = _uncalled()
    compiled = torch.compile(nn.Sequential(module), fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            torch.testing.assert_close(compiled(x), eager(x))
            torch.testing.assert_close(module(x), eager(x))
