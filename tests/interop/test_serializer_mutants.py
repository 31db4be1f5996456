"""A share of the session ``mutants``: damaged files that verify accepts end no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowerdeck.serializer import (
    DelegateCall,
    FormatError,
    Program,
    ScalarType,
    Tensor,
    deserialize_pte,
    serialize_pte,
    verify_pte,
)
from lowerdeck_zoo import official
from tests.interop import mutants

pytestmark = [
    pytest.mark.skipif(not official.available(), reason=official.REASON),
    # torch's own, from copying a tree spec inside run_decompositions
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.:FutureWarning"),
    # of forking, which is what the search does; the child runs one thread
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
SHARE = 200


def test_good_files_are_accepted_and_run(tmp_path: Path) -> None:
    files = [(file, mutants.calls_of(verify_pte(file))) for _, file in mutants.good_files()]
    assert mutants.run_batch(files, tmp_path) == ["ran"] * len(files)


def delegated() -> Program:
    return deserialize_pte(dict(mutants.good_files())["layers in XNNPACK"])


def the_call(program: Program) -> DelegateCall:
    (plan,) = program.execution_plan
    steps = (step.instr_args for chain in plan.chains for step in chain.instructions)
    return next(call for call in steps if isinstance(call, DelegateCall))


@pytest.mark.parametrize("kept", [0, 1])
def test_a_delegate_called_with_too_few_arguments_is_refused(kept: int) -> None:
    program = delegated()
    del the_call(program).args[kept:]
    with pytest.raises(FormatError, match=f"found {kept} arguments of an XNNPACK delegate"):
        verify_pte(serialize_pte(program))


def test_a_delegate_called_with_a_tensor_of_another_type_is_refused() -> None:
    program = delegated()
    tensor = program.execution_plan[0].values[the_call(program).args[0]].val
    assert isinstance(tensor, Tensor)
    tensor.scalar_type = ScalarType.CHAR
    with pytest.raises(FormatError, match="found CHAR as argument 0"):
        verify_pte(serialize_pte(program))


def test_named_data_that_are_too_small_for_a_constant_are_refused() -> None:
    program = delegated()
    for entry in program.named_data:
        entry.data = bytes(entry.data)[:4]
    with pytest.raises(FormatError, match="bytes of named data for XNNPACK value"):
        verify_pte(serialize_pte(program))


def test_no_accepted_mutant_ends_or_hangs_the_runtime(tmp_path: Path) -> None:
    figures, bad = mutants.search(mutants.good_files(), range(SHARE), tmp_path)
    assert not bad
    assert figures["made"] == SHARE
    assert figures["accepted"] > SHARE // 10
    assert figures["refused"] > SHARE // 10
