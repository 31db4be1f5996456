"""Which operators a file may call: the runtime's own, and what the caller names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import MissingKernelError, load
from lowerdeck.runner.operators.kernels import ALLOWED, ScalarKernel, TorchKernel, find_kernel
from lowerdeck.runner.operators.prim_ops import SCALAR_OPERATORS
from lowerdeck.runner.operators.view_ops import VIEW_OPERATORS
from lowerdeck.serializer import kernel_names, runtime_kernels


def split(name: str) -> tuple[str, str]:
    short, _, overload = name.partition(".")
    return short, overload


def test_every_kernel_of_the_runtime_is_known() -> None:
    assert kernel_names() == ALLOWED
    assert [name for name in sorted(ALLOWED) if find_kernel(*split(name)) is None] == []


def test_the_runtimes_own_operators_are_all_here_and_no_others() -> None:
    own = {name for name in runtime_kernels() if name.startswith("executorch_prim::")}
    here = {*SCALAR_OPERATORS, *VIEW_OPERATORS}
    assert own <= here <= set(runtime_kernels())
    for name in sorted(here):
        kernel, row = find_kernel(*split(name)), runtime_kernels()[name]
        count = kernel.arity if isinstance(kernel, ScalarKernel) else len(kernel.types)  # type: ignore[union-attr]
        assert count == len(row.arguments)


@pytest.mark.parametrize("name", ["executorch_prim::ne.Scalar", "executorch_prim::floor.Scalar"])
def test_what_the_runtime_does_not_have_is_missing(name: str) -> None:
    assert find_kernel(*split(name)) is None


def test_kernels_that_may_write_any_argument_are_those_of_the_table() -> None:
    kernels = [find_kernel(*split(name)) for name in sorted(ALLOWED)]
    bears = {
        kernel.name
        for kernel in kernels
        if isinstance(kernel, TorchKernel) and 1 in kernel.in_place
    }
    rows = {row.name for row in runtime_kernels().values() if "in_place" in row.words}
    several = {"aten::_native_batch_norm_legit_no_training.out"}  # the first one alone
    assert bears == (rows - several) | {"aten::copy.out"}
    assert "aten::mul.out" in bears
    assert "aten::floor.out" not in bears


@pytest.mark.parametrize("word", ["into_self", "first_in_place"])
def test_kernels_that_may_write_their_first_argument_are_those_of_the_table(word: str) -> None:
    rows = [row for row in runtime_kernels().values() if word in row.words]
    assert rows
    for row in rows:
        kernel = find_kernel(*split(row.name))
        assert isinstance(kernel, TorchKernel)
        assert 0 in kernel.in_place


def test_a_file_cannot_open_files(method: Any, tmp_path: Path) -> None:
    path, out = method.string(str(tmp_path / "grown")), method.tensor([4])
    args = (path, method.boolean(True), method.integer(4), *[method.null()] * 4)
    method.call("aten::from_file.out", *args[:3], out, out)
    with pytest.raises(MissingKernelError, match=r"aten::from_file\.out") as caught:
        load(method.ends([], [out])).method()
    assert caught.value.missing == ("aten::from_file.out",)
    assert caught.value.method == "forward"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["aten::segment_reduce.out", "aten::_embedding_bag_dense_backward.out"]
)
def test_operators_that_crash_on_wrong_arguments_are_refused(method: Any, name: str) -> None:
    x = method.tensor([4])
    method.call(name, x, x)
    with pytest.raises(
        MissingKernelError, match="files may call only operators with a kernel in the Exec"
    ):
        load(method.ends([x], [x])).method()


def test_a_kernel_of_one_s_own_is_one_line(method: Any) -> None:
    x, out = method.tensor([2]), method.tensor([2])
    method.call("runner_tests::twice.out", x, out, out)
    program = method.ends([x], [out])
    custom = {"runner_tests::twice.out"}
    with pytest.raises(MissingKernelError, match=r"custom_kernels=\{'runner_tests::twice.out'\}"):
        load(program).method()
    with pytest.raises(MissingKernelError, match="import the library that registers"):
        load(program, custom_kernels=custom).method()
    with torch.library._scoped_library("runner_tests", "FRAGMENT") as library:
        library.define("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        library.impl(
            "twice.out", lambda x, *, out: torch.mul(x, 2, out=out), "CompositeExplicitAutograd"
        )
        with pytest.raises(MissingKernelError):
            load(program).method()
        forward = load(program, custom_kernels=custom).method()
        assert forward(torch.ones(2))[0].tolist() == [2.0, 2.0]
