"""ETDump files of ours in the hands of ExecuTorch's devtools."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.exir_compat import to_edge_transform_and_lower
from lowerdeck.runner import Profile, load, save_etdump
from lowerdeck.script import main
from lowerdeck.serializer import ProfileEvent, RunData, write_etdump
from lowerdeck.xnnpack import XnnpackPartitioner
from lowerdeck_zoo import Holding

_NEEDED = ("executorch", "pandas", "ruamel", "tabulate")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"the devtools need {', '.join(_MISSING)}")
_READS = """
import pickle, sys
from executorch.devtools.etdump.serialize import deserialize_from_etdump_flatcc as read
pickle.dump([
    (run.name, run.bundled_input_index, [
        (one.name, one.start_time, one.end_time, one.chain_index, one.instruction_id,
         one.delegate_debug_id_int, one.delegate_debug_id_str,
         bytes(one.delegate_debug_metadata or b""))
        for one in (event.profile_event for event in run.events)
    ])
    for path in sys.argv[2:] for run in read(open(path, "rb").read()).run_data
], open(sys.argv[1], "wb"))
"""
_INSPECTS = """
import pickle, sys
from executorch.devtools import Inspector
pickle.dump([
    (block.name, [
        (event.name, event._instruction_id, event.delegate_debug_identifier, event.perf_data.raw,
         event.op_types, event.delegate_backend_name, event.raw_delegate_debug_metadatas,
         list(event.stack_traces.values()))
        for event in block.events
    ])
    for path in sys.argv[3:]
    for block in Inspector(etdump_path=path, etrecord=sys.argv[2]).event_blocks
], open(sys.argv[1], "wb"))
"""


def answered(code: str, folder: Path, *arguments: Path) -> Any:
    """Return what a script with ExecuTorch in it wrote."""
    answer = folder / "answer.pickle"
    words = [sys.executable, "-W", "ignore", "-c", code, str(answer), *map(str, arguments)]
    subprocess.run(words, check=True, capture_output=True)
    return pickle.loads(answer.read_bytes())


WRITTEN = [
    RunData(),
    RunData("Load", [], bundled_input_index=-(1 << 31)),
    RunData(
        "Execute \u00e9",
        [
            ProfileEvent("native_call_add.out", 0, (1 << 63) - 1, -1, (1 << 31) - 1),
            ProfileEvent("DELEGATE_CALL", 5, 9, 3, 4, delegate_debug_id=0),
            ProfileEvent("", 5, 9, delegate_debug_id="conv", delegate_debug_metadata=b"\0\xff"),
        ],
        7,
    ),
]


def test_devtools_read_what_was_written(tmp_path: Path) -> None:
    write_etdump(WRITTEN, tmp_path / "some.etdp")
    write_etdump([], tmp_path / "none.etdp")
    found = answered(_READS, tmp_path, tmp_path / "none.etdp", tmp_path / "some.etdp")
    assert found == [_expected(run) for run in WRITTEN]


def _expected(run: RunData) -> Any:
    told = []
    for one in run.events:
        identifier = one.delegate_debug_id
        told.append(
            (
                *(one.name, one.start_time, one.end_time, one.chain_index, one.instruction_id),
                identifier if isinstance(identifier, int) else -1,
                identifier if isinstance(identifier, str) else None,
                one.delegate_debug_metadata,
            )
        )
    return run.name, run.bundled_input_index, told


class Net(Holding, first=lambda: torch.nn.Linear(8, 8), second=lambda: torch.nn.Linear(8, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.sort(self.second(x))[0]  # no operator of XNNPACK's
        return x.sin()


@pytest.fixture(scope="module", params=["kernels", "xnnpack"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program and its record."""
    folder = tmp_path_factory.mktemp(request.param)
    exported = torch.export.export(Net().eval(), (torch.randn(2, 8),))
    chosen = [XnnpackPartitioner()] if request.param == "xnnpack" else []
    program = to_edge_transform_and_lower(
        exported, partitioner=chosen, generate_etrecord=True
    ).to_executorch()
    program.save(str(folder / "model.pte"))
    program.get_etrecord().save(str(folder / "record"))
    return folder


def test_the_inspector_shows_what_our_profiles_show(made: Path) -> None:
    method = load(made / "model.pte").method()
    calls: list[Profile] = [method.profile(torch.randn(2, 8)) for _ in range(3)]
    files = [made / "record", made / "profile.etdp", made / "command.etdp"]
    save_etdump(calls, files[1])
    words = ["run", str(made / "model.pte"), "--repeat", "4", "--etdump", str(files[2])]
    assert main(words) == 0
    (block, found), (_, of_command) = answered(_INSPECTS, made, *files)
    assert block == "Execute"
    assert {len(event[3]) for event in of_command} == {4}
    *parts, whole = found
    assert whole[0] == "Method::execute"
    assert len(parts) == len(calls[0].events)
    for number, (event, seen) in enumerate(zip(calls[0].events, parts, strict=True)):
        name, instruction, identifier, milliseconds, operators, backend, labels, traces = seen
        assert (instruction, identifier) == (event.instruction, event.identifier)
        assert milliseconds == pytest.approx(
            [call.events[number].duration_ns / 1e6 for call in calls]
        )
        assert all(name.startswith("aten.") for name in operators)
        assert (backend or "") == event.backend
        if event.identifier is not None:
            assert labels == [event.label.encode()] * 3
        elif event.backend:
            assert name == "DELEGATE_CALL"
        else:
            assert name == event.name.replace("aten::", "native_call_")
        assert "in forward" in traces[-1]
    seen = [operator for part in parts for operator in part[4]]
    assert {"aten.relu.default", "aten.sort.default", "aten.sin.default"} <= set(seen)
