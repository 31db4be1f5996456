"""Programs with test cases: ours in ExecuTorch's hands, and theirs in ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowerdeck.lowered_module import lower
from lowerdeck.runner import check_bundle, make_bundle
from lowerdeck.serializer import deserialize_bundle, write_bundle
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import official

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]

# Each in a process of its own: the runtime ends it where it does not like a file.
_RUNS = """
import sys
from executorch.extension.pybindings import portable_lib as lib
bundle = lib._load_bundled_program_from_buffer(open(sys.argv[1], "rb").read())
for number in range(2):
    try:
        print(bundle.verify_result_with_bundled_expected_output("forward", number, 1e-4, 1e-5))
    except Exception as error:
        print(repr(error))
"""
_READS = """
import pickle, sys
from executorch.devtools.bundled_program.serialize import (
    deserialize_from_flatbuffer_to_bundled_program as read,
)
found = read(open(sys.argv[1], "rb").read())
def plain(value):
    value = value.val
    if hasattr(value, "sizes"):
        return ("tensor", int(value.scalar_type), list(value.sizes), list(value.dim_order),
                bytes(value.data))
    return next((name, getattr(value, name)) for name in ("int_val", "bool_val", "double_val")
                if hasattr(value, name))
suites = [
    (suite.method_name, [
        ([plain(v) for v in case.inputs], [plain(v) for v in case.expected_outputs])
        for case in suite.test_cases
    ])
    for suite in found.method_test_suites
]
pickle.dump((found.version, suites, bytes(found.program)), open(sys.argv[2], "wb"))
"""
_WRITES = """
import sys, torch
from executorch.devtools import BundledProgram
from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
from executorch.devtools.bundled_program.serialize import (
    serialize_from_bundled_program_to_flatbuffer as write,
)
cases = [MethodTestCase(inputs, outputs) for inputs, outputs in torch.load(sys.argv[1])]
bundle = BundledProgram(None, [MethodTestSuite("forward", cases)], sys.argv[2])
open(sys.argv[3], "wb").write(write(bundle))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.conv(x).relu().mean((2, 3)))
        return found


def _python(code: str, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _made(tmp_path: Path, delegated: bool) -> tuple[Path, list[tuple[Tensor]], Any]:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    calls = [
        (torch.randn(1, 2, 8, 8),),
        (torch.randn(1, 2, 8, 8).to(memory_format=torch.contiguous_format),),
    ]
    program = torch.export.export(model, calls[0])
    path = tmp_path / "model.pte"
    lower(program, XnnpackPartitioner() if delegated else None).save(path)
    return path, calls, model


@pytest.mark.parametrize("delegated", [False, True])
def test_the_official_runtime_verifies_our_test_cases(tmp_path: Path, delegated: bool) -> None:
    path, calls, model = _made(tmp_path, delegated)
    bundle = make_bundle(path, {"forward": calls}, {"forward": model})
    wrong: Any = bundle.method_test_suites[0].test_cases[1].expected_outputs[0]
    write_bundle(bundle, tmp_path / "right.bpte")
    wrong.data = bytes(len(wrong.data))
    write_bundle(bundle, tmp_path / "wrong.bpte")
    found = {name: _python(_RUNS, tmp_path / f"{name}.bpte") for name in ("right", "wrong")}
    verdicts = {name: lines.splitlines() for name, lines in found.items()}
    assert [line.startswith("[tensor(") for line in verdicts["right"]] == [True, True]
    assert [line.startswith("[tensor(") for line in verdicts["wrong"]] == [True, False]
    assert "verification failed" in verdicts["wrong"][1]


def test_executorchs_devtools_read_what_we_write(tmp_path: Path) -> None:
    path, calls, model = _made(tmp_path, False)
    bundle = make_bundle(path, {"forward": calls}, {"forward": model})
    write_bundle(bundle, tmp_path / "model.bpte")
    _python(_READS, tmp_path / "model.bpte", tmp_path / "read")
    version, suites, program = pickle.loads((tmp_path / "read").read_bytes())
    assert version == bundle.version
    assert program == path.read_bytes()
    ((name, cases),) = suites
    assert name == "forward"
    for (inputs, outputs), (x,) in zip(cases, calls, strict=True):
        assert inputs == [("tensor", 6, [1, 2, 8, 8], [0, 1, 2, 3], x.numpy().tobytes())]
        assert outputs[0][4] == model(x).numpy().tobytes()


def test_we_read_what_executorchs_devtools_write(tmp_path: Path) -> None:
    path, calls, model = _made(tmp_path, False)
    torch.save([([x], [model(x)]) for (x,) in calls], tmp_path / "cases")
    _python(_WRITES, tmp_path / "cases", path, tmp_path / "theirs.bpte")
    theirs = deserialize_bundle((tmp_path / "theirs.bpte").read_bytes())
    ours = make_bundle(path, {"forward": calls}, {"forward": model})
    assert theirs == ours
    outcomes = check_bundle(theirs, rtol=1e-4, atol=1e-5)
    assert [outcome.right for outcome in outcomes] == [True, True]
