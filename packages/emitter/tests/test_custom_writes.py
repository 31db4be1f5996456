"""Custom operators that write their arguments; ``test_language_models`` runs the runtime's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emitter_running import check, kernels  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowerdeck.decompose import decompose
from lowerdeck.emitter import EmitConfig, MissingKernelError, UnsupportedError, emit
from lowerdeck.serializer import Tensor as StoredTensor
from lowerdeck_zoo import Holding, Of, exported, saved_and_loaded

KERNELS = ("test_writes::update.out", "test_writes::add_one")
CONFIG = EmitConfig(custom_kernels=frozenset(KERNELS))
OPS: Any = torch.ops.test_writes
SHAPE = (1, 16, 2, 4)


def _update(value: Tensor, cache: Tensor, start: int) -> Tensor:
    """Write rows of a cache as ``llama::update_cache`` does; its result is not read."""
    if isinstance(start, int) and not value.is_meta:
        cache[:, start : start + value.shape[1]] = value
    return value.new_empty(1)


def _update_out(value: Tensor, cache: Tensor, start: int, *, out: Tensor) -> Tensor:
    return out.resize_(1).copy_(_update(value, cache, start))


def _add_one(x: Tensor) -> None:
    x.add_(1)


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    with torch.library._scoped_library("test_writes", "FRAGMENT") as library:
        arguments = "Tensor value, Tensor(a!) cache, SymInt start"
        library.define(f"update({arguments}) -> Tensor")
        library.define(f"update.out({arguments}, *, Tensor(z!) out) -> Tensor(z!)")
        library.define("add_one(Tensor(a!) x) -> ()")
        library.define("add_both(Tensor(a!) x, Tensor(b!) y) -> ()")
        library.impl("update", _update, "CompositeExplicitAutograd")
        library.impl("update.out", _update_out, "CPU")
        library.impl("add_one", _add_one, "CompositeExplicitAutograd")
        library.impl("add_both", lambda x, y: None, "CompositeExplicitAutograd")
        yield


class Caching(nn.Module):
    """Calls a function that writes rows of buffers from a position on."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("cache", torch.zeros(SHAPE))
        self.register_buffer("ones", torch.ones(SHAPE))
        self.register_buffer("halves", torch.full(SHAPE, 0.5, dtype=torch.float16))
        self.constant = torch.ones(SHAPE)

    def forward(self, x: Tensor, positions: Tensor, *more: Tensor) -> Any:
        start: Any = positions[0].item()
        require: Any = torch._check
        require(start >= 0)
        require(start + x.shape[1] <= 16)

        def write(cache: Tensor, value: Tensor) -> Tensor:
            OPS.update(value, cache, start)
            return cache

        return self.body(self, write, x, *more)


def _old_is_read_afterwards(self: Any, write: Any, x: Tensor) -> Any:
    kept = self.cache.clone()
    write(self.cache, x)
    return (kept - self.cache).sum(), self.cache * 1


def _twice(self: Any, write: Any, x: Tensor) -> Any:
    found = write(self.cache, x).sum()
    return found, write(self.cache, x * found).mean()


def _first_is_read(self: Any, write: Any, x: Tensor) -> Any:
    first = write(self.cache, x).clone()
    return first.sum(), write(self.cache, x + 1).sum()


def _first_is_returned(self: Any, write: Any, x: Tensor) -> Any:
    first = write(self.cache, x).clone()
    write(self.cache, x + 1)
    return first


def _constant(self: Any, write: Any, x: Tensor) -> Any:
    return write(self.constant.clone(), x).sum(), self.constant.sum()


def _one_into_another(self: Any, write: Any, x: Tensor) -> Any:
    write(self.ones, write(self.cache, x)[:, : x.shape[1]].clone())
    return self.cache.sum(), self.ones.sum(dim=(0, 2, 3))


def _between_other_writes(self: Any, write: Any, x: Tensor) -> Any:
    before = self.cache.clone()
    self.ones.copy_(before)
    write(self.ones, x * 3)
    self.cache.add_(1)
    write(self.cache, x)
    self.cache.mul_(0.5)
    return self.cache.sum(dim=(0, 2, 3)), self.ones.sum(dim=(0, 2, 3)), before.sum()


def _view_is_read(self: Any, write: Any, x: Tensor) -> Any:
    view = self.ones[:, 2:6]
    write(self.ones, x)
    return view.sum(dim=(0, 2, 3)), (view + 1).sum()


def _branches(self: Any, write: Any, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda c: c + 1, lambda c: c * 2, (write(self.cache, x),))


# With how often a cache is copied, where it must not be.
BODIES: dict[str, tuple[Callable[..., Any], int | None]] = {
    "last": (lambda self, write, x: write(self.cache, x * 2).sum(dim=(0, 2, 3)), 0),
    "old is read": (lambda self, w, x: ((self.cache + 1).sum(), w(self.cache, x).sum()), 0),
    "old is read afterwards": (_old_is_read_afterwards, None),
    "twice": (_twice, 0),
    "first is read": (_first_is_read, None),
    "first is returned": (_first_is_returned, None),
    "no state": (lambda self, write, x: write(torch.zeros(SHAPE) + x.sum(), x), None),
    "a constant": (_constant, None),
    "an input": (lambda self, write, x: (write(x.sum() + torch.zeros(SHAPE), x) + 1, x), None),
    "branches": (_branches, None),
    "began otherwise": (lambda self, write, x: write(self.ones, x).sum(dim=(0, 2, 3)), None),
    "half": (lambda self, write, x: write(self.halves, x.half()).float(), None),
    "one into another": (_one_into_another, None),
    "between other writes": (_between_other_writes, None),
    "a view is read": (_view_is_read, None),
}
FORMS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "raw": lambda program: program,
    "decompose": decompose,
    "run_decompositions": lambda program: program.run_decompositions(),
    "saved": saved_and_loaded,
}
CASES = [
    *((name, form) for name in BODIES for form in ("raw", "run_decompositions")),
    *((name, form) for name in ("between other writes", "branches") for form in FORMS),
]
ROWS = Dim("n", min=1, max=8)


def _calls(*more: Tensor) -> list[tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return [
        (torch.randn(1, n, 2, 4), torch.arange(at, at + n), *more)
        for n, at in ((3, 0), (1, 3), (5, 4), (2, 1), (1, 15), (8, 8))
    ]


@pytest.mark.parametrize(("name", "form"), dict.fromkeys(CASES))
def test_what_a_kernel_writes_is_what_eager_writes(name: str, form: str) -> None:
    body, copies = BODIES[name]
    emitted = check(
        *(Caching(body), *_calls()),
        config=CONFIG,
        change=FORMS[form],
        custom_kernels=KERNELS,
        dynamic_shapes=({1: ROWS}, {0: ROWS}),
    )
    if copies is not None:
        assert sum("clone" in kernel for kernel in kernels(emitted)) == copies


@pytest.mark.parametrize("form", ["raw", "decompose"])
def test_a_kernel_may_write_what_the_caller_gives(form: str) -> None:
    model = Caching(lambda self, write, x, cache: (write(cache, x), cache * 2))
    check(
        *(model, *_calls(torch.full(SHAPE, 0.5))),
        config=CONFIG,
        change=FORMS[form],
        custom_kernels=KERNELS,
        dynamic_shapes=({1: ROWS}, {0: ROWS}, (None,)),
    )


def test_an_operator_that_only_writes_is_its_own_kernel() -> None:
    def doubled(x: Tensor) -> Tensor:
        y = x * 2
        OPS.add_one(y)
        return y

    emitted = check(doubled, (torch.ones(3),), config=CONFIG, custom_kernels=KERNELS)
    assert kernels(emitted) == ["mul.Scalar_out", "test_writes::add_one"]
    with pytest.raises(MissingKernelError, match="add_one"):
        emit(exported(Of(doubled), torch.ones(3)))


@pytest.mark.parametrize(
    ("write", "message"),
    [(lambda y: OPS.add_one(y[1:]), "writes a view"), (lambda y: OPS.add_both(y, y), "two names")],
)
def test_what_a_kernel_may_not_write_is_refused(
    write: Callable[[Tensor], None], message: str
) -> None:
    def written(x: Tensor) -> Tensor:
        y = x * 2
        write(y)
        return y

    with pytest.raises(UnsupportedError, match=f"add_.*{message}.*expected whole tensors"):
        emit(exported(Of(written), torch.ones(3)).run_decompositions(), config=CONFIG)


def test_what_only_a_kernel_writes_begins_as_the_model_has_it() -> None:
    class Begins(Holding, held=lambda: torch.full((3,), 5.0)):
        def forward(self, x: Tensor) -> Tensor:
            OPS.add_one(self.held)
            return self.get_buffer("held") + x

    calls = [(torch.ones(3),)] * 2
    emitted = check(Begins(), *calls, config=CONFIG, custom_kernels=KERNELS)
    (plan,) = emitted.program.execution_plan
    tensors = [one.val for one in plan.values if isinstance(one.val, StoredTensor)]
    assert [one.data_buffer_idx for one in tensors if one.data_buffer_idx] == [1]


def test_an_out_variant_may_be_registered_after_an_error() -> None:
    config = EmitConfig(custom_kernels=frozenset({"emitter_late::f.out"}))
    with torch.library._scoped_library("emitter_late", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.impl("f", lambda x: x + 1, "CompositeExplicitAutograd")
        program = exported(Of(torch.ops.emitter_late.f), torch.ones(4))
        with pytest.raises(MissingKernelError, match="has no out-variant; register one"):
            emit(program, config=config)
        library.define("f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        assert kernels(emit(program, config=config)) == ["emitter_late::f.out"]


def test_all_kernels_of_other_libraries_get_tensors_as_they_are_laid_out() -> None:
    """As for exir's users, whose kernels take images with channels last."""
    with torch.library._scoped_library("emitter_images", "FRAGMENT") as library:
        library.define("f(Tensor x) -> Tensor")
        library.define("f.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.impl("f", lambda x: x + 1, "CompositeExplicitAutograd")
        image = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
        program = exported(Of(torch.ops.emitter_images.f), image)
        emitted = emit(program, config=EmitConfig(custom_kernels=frozenset({"*"})))
        assert kernels(emitted) == ["emitter_images::f.out"]
        (plan,) = emitted.program.execution_plan
        orders = [one.val.dim_order for one in plan.values if isinstance(one.val, StoredTensor)]
        assert {tuple(order) for order in orders} == {(0, 2, 3, 1)}
        named = EmitConfig(custom_kernels=frozenset({"emitter_images::f.out"}))
        assert len(kernels(emit(program, config=named))) == 2
