"""``export_preserving``: every signature that export can record, and the model left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from unflatten_zoo import OWN_CASES, Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import Around, compare_calls, compare_changes, marked_in, replace  # type: ignore[import-not-found]

from lowerdeck.unflatten import (
    UnflattenError,
    UnsupportedProgramError,
    export_preserving,
    unflatten,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects"),
    pytest.mark.filterwarnings("ignore:.*was assigned during export:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*_norm.* is deprecated:FutureWarning"),
    # Of the recurrent layers while dynamo traces them.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

X = torch.linspace(-1, 1, 12).view(3, 4)
BY_NAME = {str(case): case for case in OWN_CASES}


@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "containers", "recurrent", "structures", "named as builtins", "given twice"),
        *("passes a bias", "identities", "counts thrice", "shared layers", "tied tables"),
        *("writes results", "increases", "chooses", "quiet", "blocks"),
    ],
)
def test_saved_programs_allow_the_same_swaps(name: str) -> None:
    case: Case = BY_NAME[name]
    made = case.unflattened("preserving saved")
    assert marked_in(made) <= set(case.marked)
    compare_changes(case, replace, made)


@pytest.mark.parametrize("name", ["mlp", "structures", "given twice", "norms in training"])
def test_other_modules_take_the_place_of_recorded_ones(name: str) -> None:
    """Another module of the same signature computes what eager computes with it."""
    case: Case = BY_NAME[name]

    def other(model: nn.Module, path: str, module: nn.Module) -> None:
        with torch.no_grad():
            for value in module.parameters():
                value.mul_(0.5)
        replace(model, path, module)

    compare_changes(case, other)


class Passes(nn.Module):
    """A module that computes nothing between two that do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Linear(4, 4))])

    def forward(self, x: Tensor) -> Any:
        return self.blocks[0](x)


def test_a_module_that_computes_nothing_is_replaced_and_hooked() -> None:
    eager = Passes().eval()
    program = export_preserving(eager, (X,))
    made: Any = unflatten(program)
    assert made.get_submodule("blocks.0.0")(X) is X
    again = torch.export.export(made, (X,))
    # Aliases are of the program that was exported first alone.
    aliases = again.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)
    assert not aliases
    for model in (made, eager):
        model.set_submodule("blocks.0.0", nn.Tanh())
    torch.testing.assert_close(made(X), eager(X))
    made, eager = unflatten(program), Passes().eval()
    eager.load_state_dict(made.state_dict())
    for model in (made, eager):
        module = model.get_submodule("blocks.0.0")
        module.register_forward_hook(lambda _, args, result: result * 3)
    torch.testing.assert_close(made(X), eager(X))


class Attends(nn.Module):
    """As a layer of attention that is given one tensor three times."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return (self.q(q) @ self.k(k).mT).softmax(-1) @ self.v(v)

    def __init__(self) -> None:
        super().__init__()
        self.attention = self.Attention()

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)


class LowRank(nn.Module):
    """As an adapter of LoRA."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) + self.up(self.down(x))


@pytest.mark.parametrize("paths", [("q",), ("v",), ("q", "k", "v")])
def test_low_rank_adapters_are_put_around_projections(paths: tuple[str, ...]) -> None:
    eager = Attends()
    made = unflatten(export_preserving(eager, (X,)))
    for path in paths:
        adapter = LowRank(nn.Identity())
        for model in (made, eager):
            other = copy.deepcopy(adapter)
            other.inner = model.get_submodule(f"attention.{path}")
            replace(model, f"attention.{path}", other)
    torch.testing.assert_close(made(X), eager(X))
    made.requires_grad_(False)
    for one in (made, eager):
        one(X).sum().backward() if one is eager else None
    compiled: Any = torch.compile(made, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), eager(X))


def test_what_decomposing_loses_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    """Swap modules of the undecomposed program: one warning says so."""
    case: Case = BY_NAME["recurrent"]
    program = case.program("preserving decomposed") if not case.lacks("decomposed") else None
    assert program is not None
    recwarn.clear()
    made = unflatten(program)
    told = [str(one.message) for one in recwarn if issubclass(one.category, UserWarning)]
    assert len(told) <= 1
    assert all("decompos" in message for message in told)
    compare_calls(case, made)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, times: Any = 1.0) -> Any:
        return x * self.weight * times


class Hooked(nn.Module):
    def __init__(self, hook: Callable[[Any], object]) -> None:
        super().__init__()
        self.one: Any = Scales()
        self.two: Any = Scales()
        self.last = nn.Linear(4, 4)
        hook(self.two)

    def forward(self, x: Tensor) -> Any:
        y = self.two(self.one(x), times=x.sum())
        return self.last(y) + y


def arguments(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))


def in_order(module: nn.Module) -> None:
    def triple(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {"times": kwargs.get("times", 2.0) * 3}

    module.register_forward_pre_hook(triple, with_kwargs=True)
    arguments(module)
    module.register_forward_pre_hook(lambda _, args: args[0] * 5, prepend=True)


def on_both_sides(module: nn.Module) -> None:
    arguments(module)
    module.register_forward_hook(lambda _, args, result: result - args[0])


def pruned(module: nn.Module) -> None:
    prune.random_unstructured(module, "weight", 0.5)  # type: ignore[no-untyped-call]


def normed(module: nn.Module) -> None:
    nn.utils.weight_norm(module)


def spectral(module: Any) -> None:
    module.weight = nn.Parameter(torch.randn(1, 4))
    nn.utils.spectral_norm(module)
    module.eval()
    module(torch.ones(3, 4))


@pytest.mark.parametrize("hook", [arguments, in_order, on_both_sides, pruned, normed, spectral])
def test_hooks_of_the_model_leave_with_their_modules(hook: Any) -> None:
    torch.manual_seed(0)
    eager = Hooked(hook)
    hooks, wanted = len(eager.two._forward_pre_hooks), eager(X)
    program = export_preserving(eager, (X,))
    assert len(eager.two._forward_pre_hooks) == hooks
    assert type(eager.two) is Scales
    torch.testing.assert_close(eager(X), wanted)
    module: Any = unflatten(program)
    torch.testing.assert_close(module(X), wanted)
    total = X.sum()
    torch.testing.assert_close(module.two(X, times=total), eager.two(X, times=total))
    for other in (Scales(), eager.two):
        module, held = unflatten(program), eager.two
        module.two = eager.two = other
        torch.testing.assert_close(module(X), eager(X))
        eager.two = held
    module = unflatten(program)
    for two in (module.two, eager.two):
        two.register_forward_hook(lambda _, args, result: result * 2)
    torch.testing.assert_close(module(X), eager(X))


def test_a_forward_of_the_module_itself_stays() -> None:
    eager = Hooked(arguments)
    plain = eager.two.forward
    eager.two.forward = lambda *args, **kwargs: plain(*args, **kwargs) + 1
    own, wanted = eager.two.forward, eager(X)
    program = export_preserving(eager, (X,))
    assert eager.two.forward is own
    torch.testing.assert_close(unflatten(program)(X), wanted)


def test_errors_of_the_model_stay_its_own() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.work(x).sum() > 0 else x + 1

    with pytest.raises(Exception, match="data-dependent"):
        export_preserving(Fails(), (X,))


def test_what_is_no_model_and_no_option_is_refused() -> None:
    with pytest.raises(UnsupportedProgramError, match="remove the option"):
        export_preserving(Passes(), (X,), preserve_module_call_signature=("blocks",))
    for wrong in (None, torch.export.export(nn.ReLU(), (X,))):
        with pytest.raises(UnsupportedProgramError, match=r"expected a torch.nn.Module"):
            export_preserving(wrong, (X,))  # type: ignore[arg-type]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_language_model_with_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    executorch = pytest.importorskip("transformers.integrations.executorch")
    executorch.register_dynamic_cache_export_support()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, **heads)
    eager = transformers.LlamaForCausalLM(config).eval()
    first = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "use_cache": True}
    with torch.no_grad():
        past = eager(**first).past_key_values

        def next_one() -> dict[str, Any]:
            ones = torch.ones(1, 5, dtype=torch.long)
            more = {"past_key_values": copy.deepcopy(past), "attention_mask": ones}
            return {**first, "input_ids": torch.tensor([[5]]), **more}

        for given in (lambda: dict(first), next_one):
            program = export_preserving(eager, (), given())
            module = unflatten(program)
            wanted, found = eager(**given()), module(**given())
            torch.testing.assert_close(found.logits, wanted.logits)
            pairs = zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True)
            for mine, its in pairs:
                torch.testing.assert_close((mine.keys, mine.values), (its.keys, its.values))
            rows = {row.path: row for row in module.swappable()}
            assert "DynamicCache" in rows["model.layers.0.self_attn"].reason
            for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "lm_head"):
                module = unflatten(program)
                replace(module, path, Around(copy.deepcopy(eager.get_submodule(path))))
                torch.testing.assert_close(module(**given()).logits, wanted.logits)
            with pytest.raises(UnflattenError, match="self_attn"):
                module.set_submodule("model.layers.0.self_attn", nn.Identity())
