"""What tests rely on from ``official``: outcomes for the corpus, errors, crashes, timeouts."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop import official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
NAMES = sorted(path.stem for path in CORPUS.glob("*.pte"))
needs_corpus = pytest.mark.skipif(not NAMES, reason="the corpus of ExecuTorch's files is absent")


def corpus_case(
    name: str, *, from_bytes: bool = True
) -> tuple[official.Case, list[dict[str, Any]]]:
    record = torch.load(CORPUS / f"{name}.io.pt", weights_only=True)
    calls = [official.Call(tuple(call["inputs"]), call["method"]) for call in record["calls"]]
    program: Path = CORPUS / f"{name}.pte"
    data = CORPUS / record["ptd"] if record["ptd"] else None
    if from_bytes:
        case = official.Case(program.read_bytes(), calls, data.read_bytes() if data else None)
    else:
        case = official.Case(program, calls, data)
    return case, record["calls"]


@needs_corpus
@pytest.mark.parametrize("from_bytes", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_corpus_file_runs_as_eager_did(name: str, from_bytes: bool) -> None:
    case, calls = corpus_case(name, from_bytes=from_bytes)
    outcome = official.run(case.program, case.calls, data=case.data)
    assert isinstance(outcome, official.Ran), outcome
    for got, call in zip(outcome.outputs, calls, strict=True):
        official.assert_outputs_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


@needs_corpus
def test_truncated_program_is_a_load_error() -> None:
    case, _ = corpus_case("control_cond")
    assert isinstance(case.program, bytes)
    outcome = official.run(case.program[:100])
    assert isinstance(outcome, official.LoadError), outcome
    assert outcome.code is not None


@needs_corpus
def test_wrong_input_is_a_method_error_with_the_code_of_the_runtime() -> None:
    case, _ = corpus_case("control_cond")
    outcome = official.run(case.program, [official.Call((torch.ones(3, dtype=torch.int8),))])
    assert isinstance(outcome, official.MethodError), outcome
    assert outcome.call == 0
    assert outcome.code == 0x12, outcome


def test_a_crash_is_an_outcome_and_the_next_case_runs() -> None:
    with official.OfficialRuntime() as runtime:
        runtime.run(official.Case(b""))
        process = runtime._process
        assert process is not None
        process.kill()
        process.wait()
        outcome = runtime.run(official.Case(b""))
        assert isinstance(outcome, official.Crash), outcome
        assert outcome.signal == "SIGKILL"
        assert isinstance(runtime.run(official.Case(b"")), official.LoadError)
        assert runtime.restarts == 1


def test_a_timeout_is_an_outcome() -> None:
    with official.OfficialRuntime() as runtime:
        assert isinstance(runtime.run(official.Case(b""), timeout=0.0), official.TimedOut)
        assert isinstance(runtime.run(official.Case(b"")), official.LoadError)


def test_types_that_torch_does_not_pickle_come_back_whole() -> None:
    for dtype in (torch.uint16, torch.uint64, torch.bits8, torch.float8_e5m2):
        given = torch.arange(6, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
        tensor = given.view(dtype).reshape(2, 3)
        back = official._revived(pickle.loads(pickle.dumps(official._plain([tensor]))))[0]
        assert back.dtype == dtype
        assert back.shape == (2, 3)
        assert torch.equal(back.flatten().view(torch.uint8), given)
