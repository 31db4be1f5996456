"""What tests rely on from ``official``: outcomes for the corpus, errors, crashes, timeouts."""

from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from lowerdeck.runner import load
from lowerdeck.serializer import deserialize_pte, verify_pte
from lowerdeck_zoo import assert_close, official

pytestmark = pytest.mark.skipif(not official.available(), reason=official.REASON)

CORPUS = Path(__file__).resolve().parent / "corpus"
# ExecuTorch 1.4.1, torchao 0.18: quantised and half-precision delegates, and a batch that varies.
MORE = CORPUS.parent / "corpus_more"
PATHS = {path.stem: path for folder in (CORPUS, MORE) for path in sorted(folder.glob("*.pte"))}


def corpus_case(
    name: str, *, from_bytes: bool = True
) -> tuple[official.Case, list[dict[str, Any]]]:
    program = PATHS[name]
    record = torch.load(program.with_suffix(".io.pt"), weights_only=True)
    calls = [official.Call(tuple(call["inputs"]), call["method"]) for call in record["calls"]]
    data = program.parent / record["ptd"] if record["ptd"] else None
    if from_bytes:
        case = official.Case(program.read_bytes(), calls, data.read_bytes() if data else None)
    else:
        case = official.Case(program, calls, data)
    return case, record["calls"]


@pytest.mark.parametrize("from_bytes", [True, False])
@pytest.mark.parametrize("name", PATHS)
def test_corpus_file_runs_as_eager_did(name: str, from_bytes: bool) -> None:
    case, calls = corpus_case(name, from_bytes=from_bytes)
    outcome = official.run(case.program, case.calls, data=case.data)
    assert isinstance(outcome, official.Ran), outcome
    for got, call in zip(outcome.outputs, calls, strict=True):
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


def test_truncated_program_is_a_load_error() -> None:
    case, _ = corpus_case("control_cond")
    assert isinstance(case.program, bytes)
    outcome = official.run(case.program[:100])
    assert isinstance(outcome, official.LoadError), outcome
    assert outcome.code is not None


def test_wrong_input_is_a_method_error_with_the_code_of_the_runtime() -> None:
    case, _ = corpus_case("control_cond")
    outcome = official.run(case.program, [official.Call((torch.ones(3, dtype=torch.int8),))])
    assert isinstance(outcome, official.MethodError), outcome
    assert outcome.call == 0
    assert outcome.code == 0x12, outcome


def test_a_crash_is_an_outcome_and_the_next_case_runs() -> None:
    with official.OfficialRuntime() as runtime:
        runtime.run(official.Case(b""))
        assert runtime._worker is not None
        process, _ = runtime._worker
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
    here, there = Pipe()
    for dtype in (torch.uint16, torch.uint64, torch.bits8, torch.float8_e5m2):
        given = torch.arange(6, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
        tensor = given.view(dtype).reshape(2, 3)
        official._send(here, [tensor])
        (back,) = official._receive(there)
        assert back.dtype == dtype
        assert back.shape == (2, 3)
        assert torch.equal(back.flatten().view(torch.uint8), given)
    here.close()
    there.close()


@pytest.mark.parametrize("name", sorted(path.stem for path in MORE.glob("*.pte")))
def test_files_that_users_have_are_read_and_verified(name: str) -> None:
    case, _ = corpus_case(name)
    assert isinstance(case.program, bytes)
    assert verify_pte(case.program) == deserialize_pte(case.program)


@pytest.mark.parametrize("name", ["int8_conv", "int8_dynamic_linear", "half_linear"])
def test_quantised_and_half_delegates_of_executorch_run_here_too(name: str) -> None:
    case, calls = corpus_case(name)
    method = load(case.program).method("forward")
    for call in calls:
        got = method.run_flat(list(call["inputs"]))
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])


def test_a_delegate_of_executorch_with_a_batch_that_varies_runs_here_too() -> None:
    case, calls = corpus_case("float_dynamic_batch")
    method = load(case.program).method("forward")
    for call in calls:
        got = method.run_flat(list(call["inputs"]))
        assert_close(got, call["outputs"], atol=call["atol"], rtol=call["rtol"])
