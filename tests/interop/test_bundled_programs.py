"""Programs with test cases in ExecuTorch's hands."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowerdeck.lowered_module import lower
from lowerdeck.runner import make_bundle
from lowerdeck.serializer import write_bundle
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Holding

# A verdict for each file, and what the devtools read: all in one process.
_DEVTOOLS = """
import pickle, sys
from executorch.extension.pybindings import portable_lib as lib
from executorch.devtools.bundled_program.serialize import (
    deserialize_from_flatbuffer_to_bundled_program as read,
)
folder, *names = sys.argv[1:]
def verdict(bundle, number):
    try:
        bundle.verify_result_with_bundled_expected_output("forward", number, 1e-4, 1e-5)
    except Exception as error:
        return str(error)
    return "right"
verdicts = {}
for name in names:
    content = open(f"{folder}/{name}.bpte", "rb").read()
    bundle = lib._load_bundled_program_from_buffer(content)
    verdicts[name] = [verdict(bundle, number) for number in range(2)]
found = read(content)
def plain(value):
    value = value.val
    return int(value.scalar_type), list(value.sizes), list(value.dim_order), bytes(value.data)
suites = [
    (suite.method_name, [
        ([plain(v) for v in case.inputs], [plain(v) for v in case.expected_outputs])
        for case in suite.test_cases
    ])
    for suite in found.method_test_suites
]
pickle.dump((verdicts, found.version, suites, bytes(found.program)), open(f"{folder}/told", "wb"))
"""


class Net(Holding, conv=lambda: nn.Conv2d(2, 4, 3), head=lambda: nn.Linear(4, 3)):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.conv(x).relu().mean((2, 3)))
        return found


def test_the_official_runtime_and_devtools_agree_with_us(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net().eval().requires_grad_(False)
    calls = [(torch.randn(1, 2, 8, 8),) for _ in range(2)]
    program, path = torch.export.export(model, calls[0]), tmp_path / "model.pte"
    bundles = {}
    for kind, partitioner in (("delegated", XnnpackPartitioner()), ("plain", None)):
        lower(program, partitioner).save(path)
        bundles[kind] = make_bundle(path, {"forward": calls}, {"forward": model})
        write_bundle(bundles[kind], tmp_path / f"{kind}.bpte")
    wrong = copy.deepcopy(bundles["delegated"])
    expected: Any = wrong.method_test_suites[0].test_cases[1].expected_outputs[0]
    expected.data = bytes(len(expected.data))
    write_bundle(wrong, tmp_path / "wrong.bpte")
    words = [str(tmp_path), "delegated", "wrong", "plain"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DEVTOOLS, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts, version, suites, content = pickle.loads((tmp_path / "told").read_bytes())
    assert verdicts["plain"] == verdicts["delegated"] == ["right", "right"]
    assert verdicts["wrong"][0] == "right"
    assert "verification failed" in verdicts["wrong"][1]
    # The devtools read what we write.
    assert (version, content) == (bundles["plain"].version, path.read_bytes())
    ((name, cases),) = suites
    assert name == "forward"
    for (inputs, outputs), (x,) in zip(cases, calls, strict=True):
        assert inputs == [(6, [1, 2, 8, 8], [0, 1, 2, 3], x.numpy().tobytes())]
        assert outputs[0][3] == model(x).numpy().tobytes()
