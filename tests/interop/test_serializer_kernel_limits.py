"""Hostile arguments of every kernel: what verify accepts leaves the official runtime alive."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowerdeck import serializer as pte
from lowerdeck_zoo.kernel_calls import CALLS, call_of
from tests.interop.mutants import run_batch

# What limits refuse, and what becomes of it in the runtime, in calls of this many seeds.
SEEDS = 25
# Their valid call here divides by a zero: an error of the kernel.
DIVIDE = {"aten::div.out_mode", "aten::floor_divide.out", "aten::remainder.Tensor_out"}


def file_of(name: str, seed: int) -> bytes:
    return bytes(pte.serialize_pte(call_of(name, seed)))


def test_a_valid_call_of_each_kernel_is_accepted_and_runs(tmp_path: Path) -> None:
    # The backward of pooling trusts its indices, which a file must not give; here they are given.
    names = [name for name in CALLS if "backward.grad_input" not in name]
    files = [file_of(name, 0) for name in names]
    for file in files:
        pte.verify_pte(file)
    outcomes = run_batch([(file, [("forward", [])]) for file in files], tmp_path)
    assert {name for name, found in zip(names, outcomes, strict=True) if found != "ran"} <= DIVIDE


def test_no_accepted_call_ends_the_runtime(tmp_path: Path) -> None:
    accepted: list[tuple[str, bytes]] = []
    for name in CALLS:
        for seed in range(1, SEEDS):
            file = file_of(name, seed)
            try:
                pte.verify_pte(file)
            except pte.FormatError:
                continue
            accepted.append((f"{name} {seed}", file))
    outcomes = run_batch([(file, [("forward", [])]) for _, file in accepted], tmp_path)
    named = zip((what for what, _ in accepted), outcomes, strict=True)
    assert [(what, end) for what, end in named if end not in ("ran", "error")] == []
    assert len(accepted) > SEEDS // 2 * len(CALLS)


@pytest.mark.parametrize(
    "name", sorted(name for name in CALLS if pte.runtime_kernels()[name].limits)
)
def test_what_the_limits_refuse_does_not_run_there(name: str, tmp_path: Path) -> None:
    refused = []
    for seed in range(1, 8 * SEEDS):
        file = file_of(name, seed)
        try:
            pte.verify_pte(file)
        except pte.FormatError as error:
            if "aborts the process" in str(error):
                refused.append((file, [("forward", [])]))
    # Each call that aborts the process costs another one.
    outcomes = run_batch(refused[:6], tmp_path)
    assert outcomes
    # Whether these divide by zero, or leave the memory, their numbers decide.
    if name not in {"aten::max_pool2d_with_indices_backward.grad_input"}:
        assert "ran" not in outcomes
