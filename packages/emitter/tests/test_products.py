"""Products: decomposed linear layers are one kernel again, batched products copy no matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emitter_running import check, kernels  # type: ignore[import-not-found]
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.emitter import EmittedProgram, emit
from lowerdeck_zoo import Of, exported
from lowerdeck_zoo.seeds import NIGHTLY

FORMS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "raw": lambda program: program,
    "decompose": decompose,
    "run_decompositions": lambda program: program.run_decompositions(),
}


class Layers(nn.Module):
    def __init__(self, body: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.register_buffer("state", torch.randn(6, 8))
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x, self.first.weight, self.first.bias)


def _written(self: Any, x: Tensor, _: Tensor, __: Tensor) -> Any:
    # The product is by the weight as it was.
    turned = self.state.t()
    found = x @ turned
    self.state.add_(1)
    return found, x @ turned, x @ self.state.t()


def _kept_and_written(self: Any, x: Tensor, _: Tensor, __: Tensor) -> Any:
    turned = self.state.t().clone()
    self.state.mul_(2)
    return x @ turned, x @ self.state.t()


def _branches(self: Any, x: Tensor, _: Tensor, __: Tensor) -> Any:
    return torch.cond(x.sum() > 0, self.first, lambda x: x @ self.second.weight, (x,))


LINEAR = {"linear": 1}
# With the kernels that a decomposed program calls.
LAYERS: dict[str, tuple[Callable[..., Any], dict[str, int] | None]] = {
    "linear": (lambda self, x, w, b: nn.functional.linear(x, w, b), LINEAR),
    "without a bias": (lambda self, x, w, b: nn.functional.linear(x, w), LINEAR),
    "addmm": (lambda self, x, w, b: torch.addmm(b, x, w.t()), LINEAR),
    "transposed": (lambda self, x, w, b: x @ w.transpose(-1, -2), LINEAR),
    "permuted": (lambda self, x, w, b: x @ w.permute(1, 0), LINEAR),
    "more dimensions": (
        lambda self, x, w, b: nn.functional.linear(x.reshape(1, -1, 8), w, b),
        {"linear": 1, "permute_copy": 0, "addmm": 0},
    ),
    "two": (lambda self, x, w, b: self.second(self.first(x).relu()), {"linear": 2, "relu": 1}),
    "factors": (lambda self, x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2), {"addmm": 1}),
    "bias of one": (lambda self, x, w, b: torch.addmm(b[:1], x, w.t()), {"addmm": 1}),
    "not transposed": (lambda self, x, w, b: x[:, :6] @ w.permute(0, 1), {"mm": 1, "linear": 0}),
    "by itself": (lambda self, x, w, b: x.t() @ x, {"permute_copy": 1, "mm": 1, "linear": 0}),
    "transpose is read": (
        lambda self, x, w, b: (x @ x.t(), x.t() * 2),
        {"linear": 1, "permute_copy": 1, "mul": 1},
    ),
    "of a part": (lambda self, x, w, b: x[:, :4] @ w[:, :4].t(), None),
    "written": (_written, None),
    "kept and written": (_kept_and_written, None),
    "branches": (_branches, None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_product_by_a_transposed_weight_is_a_linear_layer(name: str) -> None:
    body, expected = LAYERS[name]
    calls = [(torch.randn(3, 8),) for _ in range(3)]
    emitted = check(Layers(body), *calls, change=decompose)
    if expected is not None:
        found = Counter(kernel.partition(".")[0] for kernel in kernels(emitted))
        assert {kernel: found[kernel] for kernel in expected} == expected
        assert expected != LINEAR or found == LINEAR


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["two", "factors", "kept and written", "written", "branches"])
def test_any_number_of_rows(name: str, form: str) -> None:
    calls = [(torch.randn(rows, 8),) for rows in (3, 1, 8)]
    shapes = ({0: Dim("rows", min=1, max=8)},)
    check(Layers(LAYERS[name][0]), *calls, change=FORMS[form], dynamic_shapes=shapes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_floats_are_linear_layers(dtype: torch.dtype) -> None:
    body = LAYERS["two"][0]
    call = (torch.randn(3, 8, dtype=dtype),)
    emitted = check(Layers(body, dtype), call, change=decompose, tolerance=1e-3)
    assert kernels(emitted).count("linear.out") == 2


ROWS, WIDE, LONG = 3, 40, 50
Q, K, V = (torch.randn(1, heads, n, WIDE) for heads, n in ((4, ROWS), (2, LONG), (2, LONG)))


def repeated(x: Tensor, times: int = 2) -> Tensor:
    """Repeat heads as transformers does."""
    batch, heads, *matrix = x.shape
    more = x[:, :, None].expand(batch, heads, times, *matrix)
    return more.reshape(batch, heads * times, *matrix)


def scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ repeated(k).transpose(-1, -2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, repeated(k), repeated(v))


def copies_of(emitted: EmittedProgram) -> Counter[tuple[str, int]]:
    """Return the copies that a program makes, by their kernels and how many numbers they copy."""
    (plan,) = emitted.program.execution_plan
    found: Counter[tuple[str, int]] = Counter()
    for step in plan.chains[0].instructions:
        call: Any = step.instr_args
        name = plan.operators[call.op_index].name if hasattr(call, "op_index") else ""
        if name.endswith(("_copy", "clone", "index")):
            out: Any = plan.values[call.args[-1]]
            found[name.removeprefix("aten::"), torch.Size(out.val.sizes).numel()] += 1
    return found


def copies(
    function: Callable[..., Any], inputs: tuple[Tensor, ...] = (Q, K, V), rows: Any = None
) -> Counter[tuple[str, int]]:
    shapes = None if rows is None else (({2: rows}, None, None),)
    program = exported(Of(function), *inputs, dynamic_shapes=shapes)
    return copies_of(emit(decompose(program)))


@pytest.mark.parametrize(
    ("rows", "length"), [(None, LONG), (None, LONG + 1), (Dim("rows", min=1, max=LONG), LONG)]
)
def test_attention_copies_no_keys_and_no_values(rows: Any, length: int) -> None:
    most = 4 * (ROWS if rows is None else LONG)
    k, v = torch.randn(1, 2, length, WIDE), torch.randn(1, 2, length, WIDE)
    assert set(copies(attention, (Q, k, v), rows)) == {
        ("permute_copy", most * WIDE),
        ("permute_copy", most * length),
    }


@pytest.mark.parametrize(
    "function",
    [
        scores,
        lambda q, k, v: q @ k.repeat_interleave(2, 1).mT,
        lambda q, k, v: q @ repeated(k * 2).mul(3).transpose(2, 3).mul(2),
        lambda q, k, v: q @ repeated(k.mT.contiguous() + 1),
        lambda q, k, v: q[:, :, :, :1].expand(1, 4, ROWS, LONG) @ repeated(v),
    ],
)
def test_what_is_repeated_is_not_written_out(function: Callable[..., Any]) -> None:
    assert all(size < 4 * LONG * WIDE for _, size in copies(function))


def test_rows_that_are_more_than_the_matrices_leave_them_transposed() -> None:
    many = torch.randn(1, 4, 4 * LONG, WIDE)
    assert copies(scores, (many, K, V)) == {("permute_copy", 2 * LONG * WIDE): 1}
    # So it is where they vary, and each number that is copied is multiplied few times.
    rows = Dim("rows", min=1, max=LONG)
    narrow = copies(scores, (Q[..., :8], K[..., :8], V), rows)
    assert narrow == {("permute_copy", 2 * LONG * 8): 1}


def _read_twice(q: Tensor, k: Tensor, v: Tensor) -> Any:
    many = repeated(k)
    return q @ many.mT, many


@pytest.mark.parametrize(
    "function",
    [
        _read_twice,
        lambda q, k, v: q @ k[:, None].expand(1, 2, 2, LONG, WIDE).reshape(1, 4, LONG, WIDE).mT,
        lambda q, k, v: q @ k[:, :1, :1].expand(1, 4, LONG, WIDE).mT,
    ],
)
def test_what_is_no_matrix_repeated_for_one_product_is_written_out(
    function: Callable[..., Any],
) -> None:
    assert ("expand_copy", 4 * LONG * WIDE) in copies(function)


def test_what_is_cut_across_repetitions_is_copied() -> None:
    """Three heads twice as two threes: the batch of a product holds no head with its copy."""

    def across(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q @ v[:, :, None].expand(1, 3, 2, LONG, WIDE).reshape(2, 3, LONG, WIDE)

    inputs = (torch.randn(2, 3, ROWS, LONG), K, torch.randn(1, 3, LONG, WIDE))
    assert ("expand_copy", 6 * LONG * WIDE) in copies(across, inputs)


def test_a_transpose_that_two_products_read_stays() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Any:
        keys = k.mT.contiguous()
        return q[:, :2] @ keys, q[:, 2:] @ keys

    assert copies(two)["permute_copy", 2 * LONG * WIDE] == 1


@pytest.mark.parametrize(
    # Small constants are transposed ahead of time, of large ones the other operand is.
    ("length", "expected"),
    [(2, {}), (LONG, {("permute_copy", 2 * ROWS * n): 1 for n in (WIDE, LONG)})],
)
def test_of_large_constants_the_other_operand_is_transposed(
    length: int, expected: dict[tuple[str, int], int]
) -> None:
    keys = nn.Module()
    keys.register_buffer("k", torch.randn(2, length, WIDE))
    product = Of(lambda self, q: q @ self.keys.k.mT, keys=keys)
    assert copies_of(check(product, (Q[0, :2],), change=decompose)) == expected


class Drawn(nn.Module):
    """Two products, as drawn: by what is transposed, and by what is not."""

    def __init__(self, draw: dict[str, Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        draw, times = self.draw, self.draw["times"]
        more: dict[str, Callable[[Tensor], Tensor]] = {
            "interleaved": lambda x: x.repeat_interleave(times, 1),
            "tiled": lambda x: x.repeat(1, times, 1, 1),
            "expanded": partial(repeated, times=times),
        }
        repeat = more[draw["repeats"]]
        if draw["scale"] == "before":
            k, v = k * 0.5, v * 2
        keys = repeat(k).mT if draw["transposes"] == "last" else repeat(k.mT)
        if draw["transposes"] == "twice":
            keys = keys.mT.contiguous().mT
        values = repeat(v)
        if draw["scale"] == "after":
            keys, values = keys * 0.5, values * 2
        if draw["whole"]:
            found = nn.functional.scaled_dot_product_attention(q, keys.mT, values)
        else:
            found = (q @ keys) @ values
        return (found, values.sum()) if draw["read"] else found


sizes = {"batch": (1, 2), "heads": (1, 3), "times": (1, 3), "rows": (1, 4)}
drawn = st.fixed_dictionaries(
    {
        **{name: st.integers(*limits) for name, limits in sizes.items()},
        "length": st.sampled_from([1, 2, 33, 40]),
        "width": st.sampled_from([1, 3, 32, 35]),
        "repeats": st.sampled_from(["expanded", "interleaved", "tiled"]),
        "transposes": st.sampled_from(["last", "first", "twice"]),
        "scale": st.sampled_from(["", "before", "after"]),
        **{name: st.booleans() for name in ("whole", "read", "varies", "decomposed")},
    }
)


# The transpose of a view of dynamic sizes is no view of what that views.
@example(
    {"batch": 1, "heads": 1, "times": 1, "rows": 1, "length": 33, "width": 32, "scale": ""}
    | {"repeats": "expanded", "transposes": "last", "whole": False, "read": False}
    | {"varies": True, "decomposed": False}
)
@given(drawn)
@settings(max_examples=60 if NIGHTLY else 20, deadline=None)
def test_numbers_are_those_of_eager(draw: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch, heads, length, width = (draw[name] for name in ("batch", "heads", "length", "width"))

    def inputs(rows: int) -> tuple[Tensor, ...]:
        q = torch.randn(batch, heads * draw["times"], rows, width)
        return (q, *(torch.randn(batch, heads, length, width) for _ in range(2)))

    shapes = ({2: Dim("rows", min=1, max=9)}, None, None) if draw["varies"] else None
    check(
        *(Drawn(draw), *map(inputs, (3, 1, 9) if draw["varies"] else (draw["rows"],))),
        change=decompose if draw["decomposed"] else FORMS["raw"],
        tolerance=1e-4,
        dynamic_shapes=shapes,
    )
