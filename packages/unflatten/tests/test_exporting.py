"""Export with all signatures: each module can be called alone and replaced, or says why not."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.unflatten import (
    UnflattenError,
    UnsupportedProgramError,
    export_preserving,
    unflatten,
)


class Kinds(nn.Module):
    def forward(self, x: Tensor, kind: str) -> Tensor:
        return x + 1 if kind == "more" else x - 1


class Sized(nn.Module):
    def forward(self, x: Tensor, size: int) -> Tensor:
        return x.sum(1) + torch.arange(size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.work = nn.Linear(4, 4)
        self.never = nn.Dropout()
        self.many = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        for layer in self.many:
            x = layer(x)
        return {"sum": x + self.work(self.norm(x)) * scale, "same": x}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.kinds = Kinds()
        self.sized = Sized()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x, scale=x.mean())["sum"]
        y = self.second(y, scale=y.mean())["sum"]
        return self.kinds(y, "more"), self.sized(y, y.shape[0])


def recorded(made: nn.Module, path: str) -> list[tuple[Any, Any, Any]]:
    """Return what a child takes and returns when the whole is called."""
    calls: list[tuple[Any, Any, Any]] = []
    made.get_submodule(path).register_forward_hook(
        lambda _, args, kwargs, result: calls.append((args, kwargs, result)), with_kwargs=True
    )
    made(X)
    return list(calls)


X = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture(scope="module")
def eager() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def program(eager: Model) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2, max=9)
    return export_preserving(eager, (X,), dynamic_shapes=({0: rows},))


def test_table_says_what_each_module_allows(program: torch.export.ExportedProgram) -> None:
    table = unflatten(program).swappable()
    known = {row.path: row for row in table}
    assert [row.path for row in table if not row.replaceable] == ["kinds", "sized"]
    assert known["kinds"].reason.startswith("takes the text 'more', which export cannot")
    assert known["sized"].reason.startswith("takes a number that varies, which export cannot")
    assert known["sized"].reason.endswith(
        "export it anew; takes and returns flat values: the program does not tell its signature"
    )
    assert known["first.many.1"].callable_alone
    assert known["first.never"].reason.startswith("is called nowhere in this program")
    assert known["first.many"].reason.startswith("is not called itself")
    assert [row.path for row in table] == [path for path, _ in unflatten(program).named_modules()][
        1:
    ]
    assert str(table).count("replace  call") == sum(row.called for row in table) - 2


def test_what_the_table_allows_is_so(eager: Model, program: torch.export.ExportedProgram) -> None:
    wanted = eager(X)
    for row in unflatten(program).swappable():
        if not row.replaceable:
            continue
        made = unflatten(program)
        for args, kwargs, result in recorded(made, row.path):
            alone = made.get_submodule(row.path)(*args, **kwargs)
            torch.testing.assert_close(alone, result, msg=row.path)
        made.set_submodule(row.path, eager.get_submodule(row.path))
        torch.testing.assert_close(made(X), wanted, msg=row.path)


def test_replaced_modules_are_replaceable(
    eager: Model, program: torch.export.ExportedProgram
) -> None:
    made = unflatten(program)
    made.set_submodule("first.norm", eager.first.norm)
    assert made.swappable()[1:3][0].path == "first.norm"
    assert all(row.replaceable for row in made.swappable() if row.path == "first.norm")


def test_plain_exports_tell_how_to_export(eager: Model) -> None:
    table = unflatten(torch.export.export(eager, (X,))).swappable()
    assert not any(row.replaceable for row in table)
    known = {row.path: row for row in table}
    assert known["first.many"].reason == "holds 'first.many.0', which cannot be replaced"
    told = [row.reason for row in table if not row.reason.startswith("holds")]
    assert all("export_preserving" in reason for reason in told)


def test_errors_of_the_model_stay_its_own() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.work = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if self.work(x).sum() > 0:
                return x
            return x + 1

    with pytest.raises(Exception, match="data-dependent"):
        export_preserving(Fails(), (X,))


def test_two_ways_to_name_modules_are_refused(eager: Model) -> None:
    with pytest.raises(UnsupportedProgramError, match="leave it out"):
        export_preserving(eager, (X,), preserve_module_call_signature=("first",))


def test_what_is_not_recorded_cannot_be_replaced(
    eager: Model, program: torch.export.ExportedProgram
) -> None:
    for path in ("kinds", "sized"):
        made = unflatten(program)
        made.set_submodule(path, eager.get_submodule(path))
        with pytest.raises(UnflattenError, match=rf"stands for '{path}', which takes"):
            made(X)


def test_saved_programs_know_what_is_not_recorded(
    eager: Model, program: torch.export.ExportedProgram
) -> None:
    data = io.BytesIO()
    torch.export.save(program, data)
    made = unflatten(torch.export.load(io.BytesIO(data.getvalue())))
    assert str(made.swappable()) == str(unflatten(program).swappable())
    torch.testing.assert_close(made(X), eager(X))
    made.set_submodule("kinds", eager.kinds)
    with pytest.raises(UnflattenError, match="'kinds', which takes the text 'more'"):
        made(X)


class Guarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.work(x)
        return torch.relu(self.norm(y))


def test_a_module_that_decomposing_dissolved_cannot_be_replaced() -> None:
    eager = Guarded().eval()
    program = export_preserving(eager, (X,)).run_decompositions()
    with pytest.warns(UserWarning, match="lost the arguments or results of norm, work"):
        made = unflatten(program)
    torch.testing.assert_close(made(X), eager(X))
    rows = {row.path: row for row in made.swappable()}
    assert not rows["work"].replaceable
    assert "run_decompositions" in rows["work"].reason
    made.set_submodule("work", nn.Linear(4, 4))
    with pytest.raises(UnflattenError, match="'work', which is called nowhere"):
        made(X)
    # Its signature names x, as decomposing gave the name of what it takes to that.
    assert "lost what eager's takes" in rows["norm"].reason


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Linear(4, 4))])

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks[0](x)
        return result


@pytest.mark.parametrize("preserving", [True, False])
def test_a_module_that_computes_nothing_may_be_replaced_by_another(preserving: bool) -> None:
    eager = Passes().eval()
    made = unflatten((export_preserving if preserving else torch.export.export)(eager, (X,)))
    made.set_submodule("blocks.0.0", nn.Identity())
    torch.testing.assert_close(made(X), eager(X))


def test_what_computes_nothing_is_never_replaced_without_effect() -> None:
    eager = Passes().eval()
    names = ("blocks.0", "blocks.0.0", "blocks.0.1")
    made = unflatten(torch.export.export(eager, (X,), preserve_module_call_signature=names))
    (row,) = [row for row in made.swappable() if row.path == "blocks.0.0"]
    assert not row.replaceable
    assert "would have no effect" in row.reason
    other = nn.Tanh()
    made.set_submodule("blocks.0.0", other)
    with pytest.raises(UnflattenError, match=r"'blocks\.0\.0', which returns what it is"):
        made(X)
    # The block itself may be another one, with or without such a child.
    made.set_submodule("blocks.0", nn.Sequential(other, eager.blocks[0][1]))  # type: ignore[index]
    torch.testing.assert_close(made(X), eager(X.tanh()))
    plain = unflatten(torch.export.export(eager, (X,))).swappable()
    (told,) = [row for row in plain if row.path == "blocks.0.0"]
    assert "no effect" in told.reason


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale(self.scale(x, 2.0), 1.0)
        return result


class Scale(nn.Module):
    def forward(self, x: Tensor, by: float) -> Tensor:
        return x if by == 1.0 else x * by


def test_what_computes_nothing_in_some_calls_is_never_replaced_without_effect() -> None:
    eager = Sometimes().eval()
    program = torch.export.export(eager, (X,), preserve_module_call_signature=("scale",))
    made = unflatten(program)
    torch.testing.assert_close(made(X), X * 2)
    (row,) = made.swappable()
    assert not row.replaceable
    assert "in some of its calls" in row.reason
    made.set_submodule("scale", nn.Identity())
    with pytest.raises(UnflattenError, match="'scale', which returns in some of its calls"):
        made(X)


def test_what_computes_nothing_in_some_calls_has_two_forms_in_ours() -> None:
    made: Any = unflatten(export_preserving(Sometimes().eval(), (X,)))
    assert all(row.replaceable for row in made.swappable())
    torch.testing.assert_close(made.scale(X, 1.0), X)
    made.scale = Around(Scale())
    torch.testing.assert_close(made(X), X * 8)


class Borrows(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own, self.borrowed = nn.Linear(4, 4), [other]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.borrowed[0](self.own(x))
        return result


class Lends(nn.Module):
    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.lent, self.calls = nn.Linear(4, 4), calls
        self.borrows = Borrows(self.lent)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.borrows(self.lent(x) if self.calls else x)
        return result


@pytest.mark.parametrize("calls", [False, True])
def test_a_module_that_another_calls_which_does_not_hold_it_is_said_to_be_so(calls: bool) -> None:
    eager = Lends(calls=calls)
    made = unflatten(export_preserving(eager, (X,)))
    torch.testing.assert_close(made(X), eager(X))
    (row,) = [row for row in made.swappable() if row.path == "lent"]
    assert not row.replaceable
    assert "by a module that does not hold it" in row.reason
    made.set_submodule("lent", nn.Linear(4, 4))
    with pytest.raises(UnflattenError, match="by a module that does not hold it"):
        made(X)


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.act(self.work(x))
        return result


def test_a_stateless_module_that_decomposing_dissolved_is_never_replaced_without_effect() -> None:
    program = export_preserving(Activated().eval(), (X,))
    for node in program.graph.nodes:
        if "relu" in node.name:
            # As a pass does that makes a node anew.
            del node.meta["nn_module_stack"]
            node.name = "another"
    made = unflatten(program)
    assert not {row.path: row for row in made.swappable()}["act"].replaceable
    made.set_submodule("act", nn.Tanh())
    with pytest.raises(UnflattenError, match="'act', which"):
        made(X)


class Shared(nn.Module):
    # Modules of two names, the second of which is called; once by both.
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.act = nn.ReLU()
        self.same_act = self.act
        self.block = nn.Sequential(self.first, nn.Tanh())
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.same_act(self.again(self.block(x)))) + self.again(x)
        return result


@pytest.mark.parametrize("strict", [False, True])
def test_modules_of_several_names_keep_their_signatures(strict: bool) -> None:
    eager = Shared().eval()
    program = export_preserving(eager, (X,), strict=strict)
    table = unflatten(program).swappable()
    assert all(row.replaceable and row.callable_alone is row.called for row in table), str(table)
    for row in table:
        made = unflatten(program)
        for name, module in eager.named_modules(remove_duplicate=False):
            if module is eager.get_submodule(row.path):
                made.set_submodule(name, module)
        torch.testing.assert_close(made(X), eager(X), msg=row.path)


def test_strict_export_finds_out_too_what_cannot_be_recorded() -> None:
    class Texts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.kinds = Kinds()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.kinds(self.first(x), "more")
            return result

    program = export_preserving(Texts().eval(), (X,), strict=True)
    known = {row.path: row for row in unflatten(program).swappable()}
    assert known["kinds"].reason.startswith("takes the text 'more', which export cannot")
    assert known["first"].replaceable


class Quiet(nn.Module):
    # Calls in regions of another mode, some of which are outside of any too.
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.kept = Block()
        self.wide = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pair(x)
        with torch.no_grad():
            z = self.pair[1](y + 1)
            z = self.kept(z, scale=z)["sum"] + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = self.wide(z) * 2
        result: Tensor = y * z + w.float()
        return result


def test_calls_in_other_modes_keep_their_signatures() -> None:
    eager = Quiet().eval()
    program = export_preserving(eager, (X,))
    table = unflatten(program).swappable()
    assert all(row.replaceable and row.callable_alone is row.called for row in table), str(table)
    for row in table:
        made = unflatten(program)
        assert "tracepoint" not in made.print_readable(print_output=False)
        made.set_submodule(row.path, eager.get_submodule(row.path))
        torch.testing.assert_close(made(X), eager(X), msg=row.path)
        made(X.clone().requires_grad_()).sum().backward()


class Branches(nn.Module):
    """Calls one module in a branch alone, one in a branch and beside it, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.both = nn.Linear(4, 4)
        self.outside = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        taken = (self.outside(x),)
        y = torch.cond(x.sum() > 0, lambda x: -self.inside(x), lambda x: -self.both(x), taken)
        return y + self.both(x)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return 2 * self.inner(*args)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_modules_that_branches_call_are_never_replaced_without_effect(strict: bool) -> None:
    eager, x = Branches(), torch.randn(2, 4)
    buffer = io.BytesIO()
    torch.export.save(export_preserving(eager, (x,), strict=strict), buffer)
    buffer.seek(0)
    program = torch.export.load(buffer)
    made = unflatten(program)
    for given in (x, -x):
        torch.testing.assert_close(made(given), eager(given))
    rows = {row.path: row for row in made.swappable()}
    assert rows["outside"].replaceable
    made.outside = Around(eager.outside)
    assert not torch.equal(made(x), eager(x))
    for path in ("inside", "both"):
        if not rows[path].replaceable:
            assert "branch" in rows[path].reason
        made = unflatten(program)
        made.set_submodule(path, Around(made.get_submodule(path)))
        with pytest.raises(UnflattenError, match="branch"):
            made(x)


HOOKS: dict[str, Any] = {
    "pre": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 3,)),
    "pre, by name": lambda m: m.register_forward_pre_hook(
        lambda _, args, named: ((args[0] * 3,), named), with_kwargs=True
    ),
    "pre that sees, and post": lambda m: (
        m.register_forward_pre_hook(lambda _, __: None),
        m.register_forward_hook(lambda _, __, result: result + 1),
    ),
    "post": lambda m: m.register_forward_hook(lambda _, __, result: result + 1),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("first", ["plain", "preserving", "preserve all", "typed"])
def test_hooks_of_unflattened_modules_are_recorded(first: str, hook: str, strict: bool) -> None:
    """Export puts hooks on modules, for which their code was made anew, without these."""
    eager: Any = nn.Sequential(Around(nn.Linear(4, 4)), nn.Sequential(Around(nn.ReLU()))).eval()
    x = torch.randn(2, 4)
    recorded = (torch.export.export if "all" in first else export_preserving)(eager, (x,))
    if first == "plain":
        recorded = torch.export.export(eager, (x,))
    options: Any = {"preserve all": {"preserve": "all"}, "typed": {"restore_types": True}}
    made: Any = unflatten(recorded, **options.get(first, {}))
    for path in ("0", "1.0"):
        HOOKS[hook](eager.get_submodule(path))
        HOOKS[hook](made.get_submodule(path))
    wanted = eager(x)
    torch.testing.assert_close(made(x), wanted)
    again = export_preserving(made, (x,), strict=strict)
    torch.testing.assert_close(again.module()(x), wanted)
    torch.testing.assert_close(unflatten(again)(x), wanted)
    torch.testing.assert_close(made(x), wanted)


class TwoStructures(nn.Module):
    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        return torch.exp(x) if more is None else x - more.exp()


class CallsTwoStructures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = TwoStructures()

    def forward(self, x: Tensor) -> Any:
        return self.child(self.child(x), x)


def test_a_program_of_one_module_that_is_not_recorded_says_why() -> None:
    eager, x = CallsTwoStructures(), torch.randn(3)
    made = unflatten(export_preserving(eager, (x,)))
    torch.testing.assert_close(made(x), eager(x))
    (row,) = made.swappable()
    assert not row.replaceable
    assert "several structures" in row.reason
    made.child = TwoStructures()
    with pytest.raises(UnflattenError, match="several structures"):
        made(x)


class Further(nn.Module):
    """Takes whatever keywords there are, such as what might be a name of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.work = nn.Linear(4, 4)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        for value in more.values():
            x = self.work(x) + value
        return x


class Hands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.further = Further()

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        found: Tensor = self.further(x, **more)
        return found


@pytest.mark.parametrize("name", ["_carried", "carried", "_others", "_lowerdeck", "args", "_0"])
def test_no_keyword_of_a_module_is_taken_for_one_of_ours(name: str) -> None:
    eager, x = Hands(), torch.randn(3, 4)
    more = {name: torch.randn(3, 4)}
    module: Any = unflatten(export_preserving(eager, (x,), more))
    torch.testing.assert_close(module(x, **more), eager(x, **more))
    torch.testing.assert_close(module.further(x, **more), eager(x, **more))
    module.further = copy.deepcopy(eager.further)
    torch.testing.assert_close(module(x, **more), eager(x, **more))


@pytest.mark.parametrize("wrong", [None, torch.export.export(nn.ReLU(), (torch.ones(1),))])
def test_what_is_no_module_is_refused_in_words(wrong: Any) -> None:
    with pytest.raises(UnsupportedProgramError, match=r"expected a torch.nn.Module .* found a"):
        export_preserving(wrong, (torch.ones(1),))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_layers_are_replaced_by_their_index() -> None:
    eager, x = Layers(), torch.randn(2, 4)
    module: Any = unflatten(export_preserving(eager, (x,)))
    module.layers[0] = eager.layers[0] = nn.Tanh()
    module.layers[-1] = eager.layers[-1] = nn.Sigmoid()
    torch.testing.assert_close(module(x), eager(x))
    with pytest.raises(IndexError):
        module.layers[2] = nn.Tanh()


class Rotary(nn.Module):
    """Registers its buffer anew in each call, as transformers' rotary embeddings may."""

    kept: Tensor
    used: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(4), persistent=False)
        self.register_buffer("used", self.kept.clone(), persistent=False)

    def forward(self, x: Tensor, held: dict[str, Tensor]) -> dict[str, Tensor]:
        self.register_buffer("used", self.kept * 2, persistent=False)
        return {"turned": x * self.used + held["x"]}


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x: Tensor) -> Tensor:
        turned: Tensor = self.rotary(x, {"x": x})["turned"]
        return turned


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_makes_its_buffers_anew_is_exported_and_stays_as_it_was(strict: bool) -> None:
    eager: Any = Turned()
    x = torch.randn(2, 4)
    before, wanted = eager.rotary.used, Turned()(x)
    program = export_preserving(eager, (x,), strict=strict)
    assert eager.rotary.used is before
    torch.testing.assert_close(unflatten(program)(x), wanted)
    torch.testing.assert_close(eager(x), wanted)


class Once(nn.Module):
    exports = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Turned()

    def forward(self, x: Tensor) -> Tensor:
        Once.exports += 1
        if Once.exports > 1:
            raise ValueError("only once")
        turned: Tensor = self.inner(x)
        return turned


def test_the_error_of_a_model_that_can_be_run_only_once_is_its_own() -> None:
    with pytest.raises(ValueError, match="only once"):
        export_preserving(Once(), (torch.randn(2, 4),))
