"""Native code for the host: compiled, trusted on purpose only, refused when damaged."""

from __future__ import annotations

import pytest
import torch
from demo_lowering import delegates, lower, run, sealed
from torch import nn

from lowerdeck.demo_backends import (
    BlobError,
    CompilerMissingError,
    DelegateInputError,
    InductorBackend,
    InductorPartitioner,
    InductorRuntime,
    NativeCodeError,
)
from lowerdeck.demo_backends.inductor_backend import VERSION, LoadedPackage
from lowerdeck.lowered_module import PreprocessError, to_backend

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def blob(
    name: str = "InductorBackend", version: str = VERSION, inputs: str = "float32[2x4]"
) -> memoryview:
    """Return a blob as the compiler makes it, but for what is given."""
    return memoryview(sealed(name, f"{inputs}\nnative code", version))


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    program = torch.export.export(nn.ReLU(), (X,))
    with pytest.raises(CompilerMissingError, match=r"g\+\+, clang\+\+: install one"):
        InductorBackend.preprocess(program, [])
    with pytest.raises(PreprocessError, match="install one"):
        to_backend("InductorBackend", program, [])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissingError, match="no-such-compiler"):
        InductorBackend.preprocess(program, [])


def test_native_code_is_refused_until_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWERDECK_ALLOW_NATIVE_CODE", raising=False)
    with pytest.raises(NativeCodeError, match="allow_native_code=True"):
        InductorRuntime().init(blob(), [], {})
    with pytest.raises(BlobError, match="cannot be loaded"):
        InductorRuntime(allow_native_code=True).init(blob(), [], {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Other"}, "begins with that name"),
        ({"version": "1"}, "version b'1'"),
        ({"version": VERSION.replace(torch.__version__, "9.9")}, "version b'3/9.9/"),
        ({"version": f"{VERSION}9000"}, "9000' and this runtime reads"),
        ({"inputs": "many"}, "an input must be such as"),
        ({"inputs": "float32[2x]"}, "an input must be such as"),
        ({"inputs": "float32[" + "9" * 5000 + "]"}, "an input must be such as"),
    ],
)
def test_a_blob_of_another_format_machine_or_content_is_refused(
    changes: dict[str, str], message: str
) -> None:
    with pytest.raises(BlobError, match=message):
        InductorRuntime(allow_native_code=True).init(blob(**changes), [], {})


def test_a_damaged_package_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(BlobError, match="checksum"):
        InductorRuntime(allow_native_code=True).init(blob()[:-1], [], {})


@pytest.mark.parametrize(
    ("wanted", "given", "fits"),
    [
        ("float32[2x4]", torch.zeros(2, 4), True),
        ("float32[<8x4]", torch.zeros(5, 4), True),
        ("float32[]", torch.zeros(()), True),
        ("number", 3, True),
        ("float32[2x4]", torch.zeros(2, 3), False),
        ("float32[<8x4]", torch.zeros(9, 4), False),
        ("float32[2x4]", torch.zeros(8), False),
        ("float32[2x4]", torch.zeros(2, 4, dtype=torch.float64), False),
        ("float32[2x4]", torch.zeros(4, 2).t(), False),
        ("float32[2x4]", torch.zeros(2, 4, device="meta"), False),
        ("float32[2x4]", 3, False),
        ("number", torch.zeros(1), False),
    ],
)
def test_native_code_is_called_with_what_it_was_compiled_for_only(
    wanted: str, given: object, fits: bool
) -> None:
    called: list[object] = []

    def native(*inputs: object) -> list[torch.Tensor]:
        called.extend(inputs)
        return []

    package = LoadedPackage(native, (wanted,))
    runtime = InductorRuntime(allow_native_code=True)
    if fits:
        runtime.execute(package, [given])  # type: ignore[list-item]
        assert called
        return
    with pytest.raises(DelegateInputError, match="input 0 must be a dense"):
        runtime.execute(package, [given])  # type: ignore[list-item]
    assert not called


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
def test_compiled_code_equals_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    (delegate,) = delegates(lower(model, (X,), InductorPartitioner()))
    (output,) = run(delegate, InductorRuntime(allow_native_code=True), [X])
    torch.testing.assert_close(output, model(X).detach())
