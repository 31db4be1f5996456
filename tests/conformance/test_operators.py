"""Every operator sample of torch's own test data: right in the official runtime, or refused.

A sample may be refused with the emitter's own error, or be what torch cannot export. What then
runs must equal eager. Differences that are the kernel's own fault stand, with their reason, in
``known_differences.toml``; an entry that no longer differs must be removed.
"""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from lowerdeck.emitter import EmitterError, emit
from lowerdeck_zoo import official
from tests.conformance.known import DIFFERS as KNOWN
from tests.conformance.samples import Sample, operators, samples

COUNTS: collections.Counter[str] = collections.Counter()

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not official.available(), reason=official.REASON),
]


@pytest.fixture(scope="module", autouse=True)
def _totals() -> Iterator[None]:
    """Print how many (operator, dtype) pairs ended how."""
    yield
    print("\nconformance:", dict(COUNTS))


@pytest.mark.parametrize(
    ("name", "info", "dtype"), [pytest.param(n, i, d, id=n) for n, i, d in operators()]
)
def test_operator_is_right_or_refused(name: str, info: Any, dtype: torch.dtype) -> None:
    verdicts = [_verdict(sample) for sample in samples(info, dtype)]
    faults = [v for v in verdicts if v.startswith("fault")]
    if faults:
        COUNTS["known difference" if name in KNOWN else "fault"] += 1
    else:
        COUNTS["right" if "right" in verdicts else (verdicts or ["no sample"])[0]] += 1
    if name in KNOWN:
        assert faults, f"{name} is right now: remove it from known_differences.toml"
    else:
        assert not faults, "\n".join(faults)


def _verdict(sample: Sample) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.no_grad():
                expected = sample.module(*(t.clone() for t in sample.inputs))
            program = torch.export.export(sample.module, sample.inputs)
        except Exception:  # noqa: BLE001, RUF100  (whatever torch raises, it is torch's to cure)
            return "not exportable"
        try:
            data = emit(program).to_bytes()
        except EmitterError:
            return "refused"
        except Exception as error:  # noqa: BLE001, RUF100  (an untyped error is what is sought)
            return f"fault: emit raised {type(error).__name__}: {error}"
    outcome = official.run(data, [official.Call(sample.inputs)])
    if not isinstance(outcome, official.Ran):
        return f"fault: {outcome}"
    return _compare(outcome.outputs[0], pytree.tree_leaves(expected))


def _compare(found: list[Any], expected: list[Any]) -> str:
    if len(found) != len(expected):
        return f"fault: {len(found)} outputs instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, torch.Tensor):
            try:
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3, equal_nan=True)
            except AssertionError as error:
                return f"fault: wrong values: {error}"
        elif one != other:
            return f"fault: {one!r} instead of {other!r}"
    return "right"
