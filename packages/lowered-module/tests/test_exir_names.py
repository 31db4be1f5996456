"""The forms of ExecuTorch's backend API; tests/interop compares the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lowered_helpers import by_name
from torch.export import ExportedProgram

from lowerdeck.lowered_module import (
    LoweredBackendModule,
    MethodProgramsPartitionerSpec,
    PartitionError,
    PreprocessResult,
    get_delegates,
    to_backend,
)
from lowerdeck_zoo import exported


def test_a_result_is_made_and_read_by_exirs_name_for_what_tools_want() -> None:
    exir = ("processed_bytes", "debug_handle_map", "data_store_output", "_delegate_info_meta")
    made = PreprocessResult(**dict(zip(exir, (b"x", {1: (2,)}, None, "told"), strict=True)))  # type: ignore[arg-type]
    assert [getattr(made, name) for name in exir] == [b"x", {1: (2,)}, None, "told"]
    assert made == PreprocessResult(b"x", {1: (2,)}, None, "told")
    assert made.delegate_info_meta == "told"


PROGRAM = exported(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2))
PARTITIONER = by_name({"relu": "t"})
METHODS = MethodProgramsPartitionerSpec({"forward": PROGRAM}, {"forward": PARTITIONER})


def _delegates(result: Any) -> int:
    return len(get_delegates(result.graph))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((PROGRAM, PARTITIONER), {}),
        ((PROGRAM,), {"partitioner_instance": PARTITIONER}),
        ((), {"edge_program": PROGRAM, "partitioner_instance": PARTITIONER}),
        (("VerbatimBackend", PROGRAM, []), {}),
        (("VerbatimBackend", PROGRAM), {}),
        (("VerbatimBackend",), {"edge_program": PROGRAM, "compile_specs": []}),
        ((), {"backend_id": "VerbatimBackend", "edge_program": PROGRAM, "compile_specs": []}),
    ],
)
def test_a_program_with_its_partitioner_or_backend(
    args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    lowered = to_backend(*args, **named)
    assert isinstance(lowered, LoweredBackendModule) or _delegates(lowered) == 1


def test_several_methods() -> None:
    for lowered in (to_backend(METHODS), to_backend(method_edge_program_partitioners=METHODS)):
        assert {name: _delegates(program) for name, program in lowered.items()} == {"forward": 1}


@pytest.mark.parametrize(
    ("args", "named", "error", "told"),
    [
        ((), {}, PartitionError, "found a NoneType, expected a backend id"),
        ((3,), {}, PartitionError, "found a int, expected a backend id"),
        ((PROGRAM,), {}, PartitionError, "found a NoneType as partitioner"),
        ((PROGRAM, 7), {}, PartitionError, "found a int as partitioner"),
        ((PROGRAM, PARTITIONER, []), {}, TypeError, "too many positional arguments"),
        ((PROGRAM, PARTITIONER), {"edge_program": PROGRAM}, TypeError, "multiple values"),
        ((PROGRAM, PARTITIONER), {"compile_specs": []}, TypeError, "unexpected keyword argument"),
        ((METHODS,), {"partitioner": PARTITIONER}, TypeError, "unexpected keyword argument"),
        ((), {"backend_id": PROGRAM}, TypeError, "missing a required argument: 'edge_program'"),
        ((), {"method_edge_program_partitioners": PROGRAM}, TypeError, "missing a required"),
        (("VerbatimBackend",), {}, PartitionError, "after backend id 'VerbatimBackend'"),
    ],
)
def test_what_is_of_no_form_is_told(
    args: tuple[Any, ...], named: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        to_backend(*args, **named)


def test_a_partitioner_that_fails_is_named_and_its_error_kept() -> None:
    def fails(program: ExportedProgram) -> None:
        raise KeyError("weights")

    with pytest.raises(
        PartitionError, match="partitioner function failed with KeyError"
    ) as caught:
        to_backend(PROGRAM, fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_program_is_emitted_with_exirs_words() -> None:
    lowered = to_backend("VerbatimBackend", PROGRAM, [])
    assert lowered.program(emit_stacktrace=True).execution_plan[0].chains[0].stacktrace
    assert not lowered.program().execution_plan[0].chains[0].stacktrace
