"""Native code for the host: compiled, trusted on purpose only, refused when damaged."""

from __future__ import annotations

import hashlib
import platform

import pytest
import torch
from demo_lowering import delegates, lower, run
from torch import nn

from lowerdeck.demo_backends import (
    BlobError,
    CompilerMissingError,
    InductorBackend,
    InductorPartitioner,
    InductorRuntime,
)
from lowerdeck.demo_backends.errors import NativeCodeError
from lowerdeck.lowered_module import PreprocessError, to_backend

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def blob(**changes: object) -> memoryview:
    """Return a blob as the compiler makes it, but for the changes."""
    package = b"native code"
    fields = {
        "name": "InductorBackend",
        "version": 1,
        "inputs": 1,
        "digest": hashlib.sha256(package).hexdigest(),
        "target": f"{torch.__version__} {platform.system()}-{platform.machine()}",
    }
    first = " ".join(str(one) for one in (fields | changes).values())
    return memoryview(first.encode() + b"\n" + package)


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
        ({"version": 2}, "version '2'"),
        ({"target": "9.9 Plan9-vax"}, "Plan9"),
        ({"inputs": "many"}, "number of inputs"),
        ({"digest": "0" * 64}, "checksum"),
    ],
)
def test_a_blob_of_another_format_machine_or_content_is_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BlobError, match=message):
        InductorRuntime(allow_native_code=True).init(blob(**changes), [], {})


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own parts
def test_compiled_code_equals_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).eval()
    (delegate,) = delegates(lower(model, (X,), InductorPartitioner()))
    (output,) = run(delegate, InductorRuntime(allow_native_code=True), [X])
    torch.testing.assert_close(output, model(X).detach())
