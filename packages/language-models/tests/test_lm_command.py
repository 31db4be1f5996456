"""The command ``lowerdeck lm``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import PROMPT, greedy, save_folder, tokenizer
from transformers.utils import logging

from lowerdeck.inspect import ExitStatus

EXPORT = ["lm", "export", "{folder}"]
RUN = ["lm", "run", "--runtime", "lowerdeck"]


@pytest.fixture
def export(llama: Path, tmp_path: Path) -> tuple[object, ...]:
    """The words that export the small llama."""
    return "lm", "export", llama, "-o", tmp_path / "model.pte"


def test_from_a_folder_to_a_text(tmp_path: Path, shell: Any) -> None:
    model = save_folder(tmp_path / "folder")
    file = tmp_path / "model.pte"
    given = ("lm", "export", tmp_path / "folder", "-o", file, "--context", 64, "--check", PROMPT)
    told = shell(*given).out
    assert "16 of 16 tokens match the model's" in told
    assert (file.parent / "model.tokenizer.json").is_file()
    said = shell("lm", "run", file, PROMPT, "--tokens", 8, "--runtime", "lowerdeck").out
    words = tokenizer()
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, 8))
    plain = "".join(each for each in wanted if each.isalnum())
    assert all(each in said for each in plain)
    assert "an emulator" in said


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["lm", "export", "nowhere"], 3, "nowhere is not a folder"),
        (["lm", "export", "name/of-a-model"], 3, "as from `hf download NAME --local-dir FOLDER`"),
        (["lm", "export", "{empty}"], 3, "has no tokenizer.json"),
        (["lm", "export", "{broken}"], 3, "config.json is not of a model"),
        *((["lm", "export", one], 3, "tokenizer.json") for one in ("{no_words}", "{blank}")),
        ([*EXPORT, "-o", "{folder}/config.json"], 2, "config.json of FOLDER"),
        ([*EXPORT, "-o", "{folder}/model.safetensors"], 2, "model.safetensors of FOLDER"),
        ([*EXPORT, "-o", "{empty}/no/model.pte"], 4, "there is no folder"),
        ([*EXPORT, "--context", "8", "--check", PROMPT], 3, "16, but the context is 8: give a"),
        ([*EXPORT, "--context", "8", "--check", ""], 3, "the prompt of --check has no tokens"),
        (
            [*RUN, "{folder}", "text"],
            3,
            "is a folder, expected a .pte file: use `lowerdeck lm export",
        ),
        ([*RUN, "nowhere.pte", "text"], 3, "there is no file nowhere.pte"),
        ([*RUN, __file__, "text"], 3, "is not a .pte file"),
        ([*RUN, ".", "text"], 3, "'.' is a folder, expected a model's file"),
        ([*RUN, "nowhere.pte", "text", "--tokenizer", "{folder}"], 3, "nowhere.pte"),
        ([*RUN, "x.pte", "text", "--tokens", "0"], 3, "--tokens is 0"),
        ([*RUN, "x.pte", "text", "--tokenizer", "{empty}/no"], 3, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_the_work(
    words: list[str],
    status: int,
    told: str,
    llama: Path,
    tmp_path: Path,
    shell: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"empty": tmp_path / "empty", "broken": tmp_path / "broken", "folder": llama}
    places["empty"].mkdir()
    shutil.copytree(llama, places["broken"])
    (places["broken"] / "config.json").write_text("{")
    for name, text in {"no_words": "{}", "blank": ""}.items():
        places[name] = shutil.copytree(llama, tmp_path / name)
        (places[name] / "tokenizer.json").write_text(text)
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    error = shell(*(word.format(**places) for word in words), status=status).err
    assert told in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*.pte"))
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


def test_what_a_file_of_a_model_cannot_do_is_one_line(
    export: Any, llama: Path, tmp_path: Path, shell: Any
) -> None:
    shell(*export, "--context", 32)
    for words, told in {
        (tmp_path / "model.pte", ""): "the prompt has no tokens",
        (tmp_path / "model.pte", PROMPT, "--tokens", 64): "64 more are requested",
        (llama / "tokenizer.json", "a", "--tokenizer", llama): "cannot be loaded",
    }.items():
        assert told in shell("lm", "run", *words, "--runtime", "lowerdeck", status=3).err


def test_a_prompt_may_have_any_letters_in_the_c_locale(
    export: Any, tmp_path: Path, shell: Any
) -> None:
    script = "import sys; from lowerdeck.script import main; sys.exit(main())"
    shell(*export, "--context", 32)
    words = ["lm", "run", str(tmp_path / "model.pte"), "--tokens", "2", "--runtime", "lowerdeck"]
    good = f"na\u00efve {PROMPT}".encode()
    for prompt, status, told in ((good, 0, b"more at"), (b"\xff", 2, b"UTF-8")):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, *words, prompt],
            capture_output=True,
            check=False,
            env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        )
        assert done.returncode == status, done.stderr
        assert told in done.stdout + done.stderr
        assert (done.stdout + done.stderr).isascii()


def test_an_interrupt_leaves_nothing_half_written(
    export: Any, tmp_path: Path, shell: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.export.export", interrupted)
    shell(*export, status=ExitStatus.INTERRUPTED)
    assert not list(tmp_path.iterdir())


def test_steps_are_reported_while_they_go_on(export: Any, tmp_path: Path, shell: Any) -> None:
    words = ("--context", 32, "--check", "the", "--separate-decode", "--quantize", "8da8w")
    told = shell(*export, *words)
    lines = [line.split(" s  ")[1] for line in told.err.splitlines() if " s  " in line]
    assert lines == [
        "loading the model",
        "trying it with a cache",
        "quantising linear layers to 8da8w",
        "exporting forward, 32 tokens at once",
        "exporting decode, 1 tokens at once",
        "lowering",
        f"writing {tmp_path / 'model.pte'}",
        "checking its tokens",
    ]
    time = next(line for line in told.out.splitlines() if line.startswith("time "))
    assert ", export forward " in time
    assert "export 0.00 s" not in time


def test_quiet_is_quiet(export: Any, shell: Any) -> None:
    drawn = []

    def seen(factory: Any, given: Any, named: Any) -> Any:
        drawn.append(named)
        return factory(*given, **named)

    before = logging.set_tqdm_hook(seen)
    try:
        shell(*export, "--context", 32)
        assert drawn
        drawn.clear()
        assert not shell(*export, "--context", 32, "--quiet").err
        assert not drawn
    finally:
        assert logging.set_tqdm_hook(before) is seen


def test_a_context_that_is_cut_and_what_was_quantised_are_reported(
    export: Any, shell: Any
) -> None:
    told = shell(*export, "--context", 100_000, "--quantize", "8da4w").out
    assert "context        128, the model's limit, not 100000" in told
    assert "quantised      80.8% of 99,840 weights; float: 19.2% embeddings" in told
    assert "made for" not in shell(*export, "--context", 128).out
