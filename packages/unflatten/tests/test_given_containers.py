"""Modules that put values into a list, dict or cache that they are given compute as eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import UnflattenError, export_preserving, unflatten


@dataclass
class Held:
    one: Tensor
    other: Tensor | None = None


class Cache:
    """As transformers': an object that grows, and that pytree knows."""

    def __init__(self, values: list[Tensor] | None = None) -> None:
        self.values = [] if values is None else values

    def add(self, value: Tensor) -> Tensor:
        self.values.append(value)
        return torch.cat(self.values)


class Pair(NamedTuple):
    one: list[Tensor]
    other: Tensor


torch.export.register_dataclass(Held, serialized_type_name="lowerdeck_tests_Held")
torch.utils._pytree.register_pytree_node(
    Cache,
    lambda cache: (cache.values, None),
    lambda values, _: Cache(list(values)),
    serialized_type_name="lowerdeck_tests_Cache",
)


def set_item(held: Any, value: Tensor) -> None:
    held[0] = held[0] + value


def append(held: Any, value: Tensor) -> None:
    held.append(value)


def pop_item(held: Any, value: Tensor) -> None:
    held[0] = held.pop() * value


def set_key(held: Any, value: Tensor) -> None:
    held["x"] = held["x"] * value


def add_key(held: Any, value: Tensor) -> None:
    held["y"] = value


def set_attribute(held: Any, value: Tensor) -> None:
    held.one = held.one - value


def fill_attribute(held: Any, value: Tensor) -> None:
    held.other = value


def grow(held: Any, value: Tensor) -> None:
    held.add(value)


def set_deep(held: Any, value: Tensor) -> None:
    held[1]["x"][0] = value


def set_pair(held: Any, value: Tensor) -> None:
    held.one[0] = value + held.other


Change = Callable[[Any, Tensor], None]
Make = Callable[[Tensor], Any]

CHANGES: tuple[tuple[Change, Make], ...] = (
    (set_item, lambda x: [x * 2]),
    (append, lambda x: []),
    (append, lambda x: [x]),
    (pop_item, lambda x: [x, x + 1, x + 2]),
    (set_key, lambda x: {"x": x}),
    (add_key, lambda x: {}),
    (set_attribute, Held),
    (fill_attribute, Held),
    (grow, lambda x: Cache()),
    (grow, lambda x: Cache([x])),
    (set_deep, lambda x: (x, {"x": [x]})),
    (set_pair, lambda x: Pair([x], x)),
)


class Fills(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.change = change

    def forward(self, x: Tensor, held: Any) -> Tensor:
        self.change(held, self.work(x))
        leaves = torch.utils._pytree.tree_leaves(held)
        for leaf in leaves:
            if leaf is not None:
                x = x + leaf.sum(0)
        return x


class Passes(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.inner = Fills(change)

    def forward(self, x: Tensor, *, held: Any) -> Tensor:
        found: Tensor = self.inner(x, held)
        return found


class Model(nn.Module):
    """Keeps what it makes to itself, and reads it after others changed it."""

    def __init__(self, change: Change, make: Make) -> None:
        super().__init__()
        self.first, self.second = Passes(change), Passes(change)
        self.make = make

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        held = self.make(x)
        y = self.second(self.first(x, held=held), held=held)
        return y, held


class Around(nn.Module):
    def __init__(self, change: Change, make: Make) -> None:
        super().__init__()
        self.model = Model(change, make)

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def leaves_of(value: Any) -> list[Any]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(value)
    return leaves


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.heavy)])
@pytest.mark.parametrize(("change", "make"), CHANGES)
def test_what_modules_put_into_containers_is_not_lost(
    change: Change, make: Make, strict: bool
) -> None:
    eager, x = Around(change, make), torch.randn(3, 4)
    changing = {f"model.{path}{inner}" for path in ("first", "second") for inner in ("", ".inner")}
    try:
        torch.export.export(eager, (x,), strict=strict)
    except Exception:
        assert strict  # what only the other export takes
        return
    program = export_preserving(eager, (x,), strict=strict)
    module = unflatten(program)
    torch.testing.assert_close(leaves_of(module(x)), leaves_of(eager(x)))
    rows = {row.path: row for row in module.swappable()}
    assert {path for path, row in rows.items() if not row.replaceable} == changing
    kind = type(make(x)).__name__
    assert all(f"changes a {kind} that it is given" in rows[path].reason for path in changing)
    for path in rows.keys() - changing:
        replaced = unflatten(program)
        replaced.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))
        torch.testing.assert_close(leaves_of(replaced(x)), leaves_of(eager(x)))
    for path in changing:
        replaced = unflatten(program)
        replaced.set_submodule(path, copy.deepcopy(eager.get_submodule(path)))
        with pytest.raises(UnflattenError, match="that it is given"):
            replaced(x)


class Reads(nn.Module):
    def forward(self, x: Tensor, held: dict[str, list[Tensor]]) -> Tensor:
        held["x"][0].add_(1)
        return x + held["x"][0] + len(held)


class Gives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reads = Reads()

    def forward(self, x: Tensor) -> Tensor:
        held = {"x": [x * 2]}
        found: Tensor = self.reads(x, held) + held["x"][0]
        return found


def test_modules_that_only_read_containers_or_write_in_place_are_recorded() -> None:
    eager, x = Gives(), torch.randn(3, 4)
    module: Any = unflatten(export_preserving(eager, (x,)))
    assert [row.replaceable for row in module.swappable()] == [True]
    torch.testing.assert_close(module(x), eager(x))
    module.reads = Reads()
    torch.testing.assert_close(module(x), eager(x))


class TwoWays(nn.Module):
    def forward(self, x: Tensor, held: list[Tensor], kind: str) -> Tensor:
        held[0] = held[0] + 1 if kind == "more" else held[0] - 1
        return x


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways, self.fills = TwoWays(), Fills(set_item)

    def forward(self, x: Tensor) -> Tensor:
        held = [x]
        found: Tensor = self.fills(self.ways(x, held, "more"), held)
        return found


def test_containers_are_found_beside_what_export_cannot_record() -> None:
    eager, x = Texts(), torch.randn(3, 4)
    module = unflatten(export_preserving(eager, (x,)))
    torch.testing.assert_close(module(x), eager(x))
    kept = {row.path: row.replaceable for row in module.swappable()}
    assert kept["fills.work"]
    assert not kept["fills"]


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_language_model_with_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    executorch = pytest.importorskip("transformers.integrations.executorch")
    executorch.register_dynamic_cache_export_support()
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    eager = transformers.LlamaForCausalLM(config).eval()
    first = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "use_cache": True}
    with torch.no_grad():
        past = eager(**first).past_key_values

        def next_one() -> dict[str, Any]:
            ones = torch.ones(1, 5, dtype=torch.long)
            more = {"past_key_values": copy.deepcopy(past), "attention_mask": ones}
            return {**first, "input_ids": torch.tensor([[5]]), **more}

        for given in (lambda: dict(first), next_one):
            module = unflatten(export_preserving(eager, (), given()))
            wanted, found = eager(**given()), module(**given())
            torch.testing.assert_close(found.logits, wanted.logits)
            pairs = zip(found.past_key_values.layers, wanted.past_key_values.layers, strict=True)
            for mine, its in pairs:
                torch.testing.assert_close((mine.keys, mine.values), (its.keys, its.values))
            rows = {row.path: row for row in module.swappable()}
            assert "changes a DynamicCache" in rows["model.layers.0.self_attn"].reason
            assert rows["model.layers.0.self_attn.q_proj"].replaceable
