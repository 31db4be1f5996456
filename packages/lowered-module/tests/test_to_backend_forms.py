"""The three forms of ``to_backend``, by position and by the names that exir's callers type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import ExportedProgram, export

from lowerdeck.lowered_module import (
    BackendDetails,
    LoweredBackendModule,
    MethodProgramsPartitionerSpec,
    PartitionError,
    PreprocessResult,
    get_delegates,
    to_backend,
)
from lowerdeck.lowered_module.testing import TaggingPartitioner


class KeywordBackend(BackendDetails):
    """Keeps the names of its specs, to be told apart."""

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: list[Any]) -> PreprocessResult:
        return PreprocessResult(",".join(spec.key for spec in compile_specs).encode())


PROGRAM = export(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), (torch.ones(2),))
PARTITIONER = TaggingPartitioner(
    lambda node: "relu" if "relu" in node.name else None, backend_id="KeywordBackend"
)
METHODS = MethodProgramsPartitionerSpec({"forward": PROGRAM}, {"forward": PARTITIONER})


def _delegates(result: Any) -> int:
    return len(get_delegates(result.graph))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((PROGRAM, PARTITIONER), {}),
        ((PROGRAM,), {"partitioner_instance": PARTITIONER}),
        ((PROGRAM,), {"partitioner": PARTITIONER}),
        ((), {"edge_program": PROGRAM, "partitioner_instance": PARTITIONER}),
        ((), {"edge_program": PROGRAM, "partitioner": PARTITIONER}),
    ],
)
def test_a_program_and_its_partitioner(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    assert _delegates(to_backend(*args, **named)) == 1


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("KeywordBackend", PROGRAM, []), {}),
        (("KeywordBackend", PROGRAM), {}),
        (("KeywordBackend",), {"edge_program": PROGRAM, "compile_specs": []}),
        ((), {"backend_id": "KeywordBackend", "edge_program": PROGRAM, "compile_specs": []}),
    ],
)
def test_a_backend_and_a_program(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    assert isinstance(to_backend(*args, **named), LoweredBackendModule)


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
        ((PROGRAM, PARTITIONER, []), {}, TypeError, "found 3 arguments"),
        ((PROGRAM, PARTITIONER), {"edge_program": PROGRAM}, TypeError, "multiple values"),
        ((PROGRAM, PARTITIONER), {"partitioner": PARTITIONER}, TypeError, "multiple values"),
        ((PROGRAM, PARTITIONER), {"compile_specs": []}, TypeError, "unexpected argument"),
        ((METHODS,), {"partitioner": PARTITIONER}, TypeError, "unexpected argument"),
        (
            (PROGRAM,),
            {"partitioner": PARTITIONER, "partitioner_instance": METHODS},
            TypeError,
            "both partitioner and partitioner_instance",
        ),
        ((), {"backend_id": PROGRAM}, TypeError, "unexpected argument 'backend_id'"),
        ((), {"method_edge_program_partitioners": PROGRAM}, TypeError, "unexpected argument"),
        (("KeywordBackend",), {}, PartitionError, "after backend id 'KeywordBackend'"),
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
