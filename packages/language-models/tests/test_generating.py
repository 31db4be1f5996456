"""Text from the process of another runtime, whatever that process does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowerdeck.language_models import LanguageModelError, generating
from lowerdeck.language_models.generating import ModelFile, Timing, generate

LOUD = "import os, sys; os.write(2, b'x' * (1 << 20) + b'\\n')"


def tokens_of(
    code: str, monkeypatch: pytest.MonkeyPatch, timing: Timing, prompt: Sequence[int] = (1, 2)
) -> Iterator[int]:
    """Return the tokens that a program tells which stands for the bridge."""
    monkeypatch.setattr(generating, "_BRIDGE", ("-c", code))
    program: Any = SimpleNamespace(methods=("forward",))
    model = ModelFile(Path("model.pte"), 8, 1 << 20, (), program)
    return generate(model, prompt, 8, official=True, timing=timing)


def test_a_runtime_that_logs_much_is_heard_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = Timing()
    code = f"""{LOUD}; print(5, flush=True); {LOUD}; print(7); print('{{"runtime": "loud"}}')"""
    assert list(tokens_of(code, monkeypatch, timing)) == [5, 7]
    assert timing.runtime == "loud"


def test_a_prompt_of_any_length_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, sys; print(len(json.load(sys.stdin)['prompt']))"
    tokens = tokens_of(code, monkeypatch, Timing(), [100_000] * 60_000)
    assert list(tokens) == [60_000]


def test_the_last_line_of_what_it_logged_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"{LOUD}; print(5, flush=True); sys.exit('\\xff: no such operator\\n')"
    tokens = tokens_of(code, monkeypatch, Timing())
    assert next(tokens) == 5
    with pytest.raises(
        LanguageModelError, match=r"ended with 1 over model\.pte: .*no such operator;"
    ):
        next(tokens)
    with pytest.raises(LanguageModelError, match=r"ended with 3 over model\.pte: no message;"):
        list(tokens_of("import os; os._exit(3)", monkeypatch, Timing()))


@pytest.mark.skipif(sys.platform == "win32", reason="asks the system by signal 0")
def test_it_is_ended_where_nobody_wants_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
    tokens: Any = tokens_of(code, monkeypatch, Timing())
    process = next(tokens)
    os.kill(process, 0)
    tokens.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
