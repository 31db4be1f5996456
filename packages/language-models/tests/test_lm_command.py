"""The command ``lowerdeck lm``."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from folders import PROMPT, greedy, save_folder, tokenizer
from transformers.utils import logging

from lowerdeck.language_models import commands
from lowerdeck.language_models.steps import Steps, without_bars
from lowerdeck.serializer import ExitStatus


def lowerdeck(*words: object) -> int:
    """Run the installed script, as a user does."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="lowerdeck")
    return int(script.load()(list(map(str, words))))


def test_from_a_folder_to_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_folder(tmp_path / "folder")
    file = tmp_path / "model.pte"
    given = ("lm", "export", tmp_path / "folder", "-o", file, "--context", 64, "--check", PROMPT)
    assert lowerdeck(*given) == ExitStatus.DONE
    told = capsys.readouterr().out
    assert "16 of 16 tokens as the model's own" in told
    assert (file.parent / "model.tokenizer.json").is_file()
    assert lowerdeck("lm", "run", file, PROMPT, "--tokens", 8, "--runtime", "lowerdeck") == 0
    said = capsys.readouterr().out
    words = tokenizer()
    wanted = words.decode(greedy(model, words.encode(PROMPT).ids, 8))
    plain = "".join(each for each in wanted if each.isalnum())
    assert all(each in said for each in plain)
    assert "it emulates the runtime" in said
    assert lowerdeck("lm", "run", file, PROMPT, "--tokenizer", tmp_path / "folder") == 3
    assert "64 more are asked for" in capsys.readouterr().err


def test_how_much_was_quantised_is_told(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("lm", "export", llama, "-o", tmp_path / "model.pte", "--context", 16)
    assert lowerdeck(*given, "--quantize", "8da4w") == ExitStatus.DONE
    assert (
        "quantised      80.8% of 99,840 weights; floats stay 19.2% of embeddings"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lm", "export", "nowhere"], "nowhere is no folder"),
        (["lm", "export", "name/of-a-model"], "as `hf download NAME --local-dir FOLDER`"),
        (
            ["lm", "run", "{folder}", "text"],
            "is a folder, expected a .pte file: `lowerdeck lm export",
        ),
        (["lm", "export", "{empty}"], "has no tokenizer.json"),
        (["lm", "run", "nowhere.pte", "text"], "there is no file nowhere.pte"),
        (["lm", "run", __file__, "text"], "is no .pte file"),
        (["lm", "run", ".", "text"], "'.' is a folder, expected a model's file"),
        (["lm", "run", "nowhere.pte", "text", "--tokenizer", "{folder}"], "nowhere.pte"),
        (["lm", "run", "x.pte", "text", "--tokens", "0"], "--tokens is 0"),
        (["lm", "run", "x.pte", "text", "--tokenizer", "{empty}/no"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: list[str],
    told: str,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "folder": llama}
    runtime = ["--runtime", "lowerdeck"] if words[1] == "run" else []
    assert lowerdeck(*(word.format(**places) for word in words), *runtime) == 3
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*.pte"))


def test_an_empty_prompt_and_another_file_are_refused(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.pte"
    assert lowerdeck("lm", "export", llama, "-o", file, "--context", 32) == 0
    assert lowerdeck("lm", "run", file, "", "--runtime", "lowerdeck") == 3
    assert "the prompt has no tokens" in capsys.readouterr().err
    other = llama / "tokenizer.json"
    assert lowerdeck("lm", "run", other, "a", "--tokenizer", llama, "--runtime", "lowerdeck") == 3
    assert "cannot be loaded" in capsys.readouterr().err


def test_a_prompt_may_have_any_letters_in_the_c_locale(llama: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from importlib.metadata import entry_points;"
        "(script,) = entry_points(group='console_scripts', name='lowerdeck');"
        "sys.exit(script.load()())"
    )
    file = tmp_path / "model.pte"
    assert lowerdeck("lm", "export", llama, "-o", file, "--context", 32) == 0
    words = ["lm", "run", str(file), "--tokens", "2", "--runtime", "lowerdeck"]
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
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "lower_decoder", interrupted)
    file = tmp_path / "model.pte"
    assert lowerdeck("lm", "export", llama, "-o", file) == ExitStatus.INTERRUPTED
    assert not list(tmp_path.iterdir())


def test_no_file_of_the_model_is_written_over(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        before = (llama / name).read_bytes()
        assert lowerdeck("lm", "export", llama, "-o", llama / name) == 2
        assert f"{name} of FOLDER" in capsys.readouterr().err
        assert (llama / name).read_bytes() == before


def test_no_folder_is_made_for_the_file(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lowerdeck("lm", "export", llama, "-o", tmp_path / "no" / "model.pte") == 4
    assert "there is no folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_steps_are_told_while_they_go_on(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "lm",
        "export",
        llama,
        "-o",
        tmp_path / "model.pte",
        "--context",
        32,
        "--check",
        "the",
    )
    assert lowerdeck(*given, "--separate-decode", "--quantize", "8da8w") == ExitStatus.DONE
    told = capsys.readouterr()
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


def test_quiet_is_quiet(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []

    def seen(factory: Any, given: Any, named: Any) -> Any:
        drawn.append(named)
        return factory(*given, **named)

    before = logging.set_tqdm_hook(seen)
    try:
        given = ("lm", "export", llama, "-o", tmp_path / "model.pte", "--context", 32)
        assert lowerdeck(*given) == ExitStatus.DONE
        assert drawn
        drawn.clear()
        capsys.readouterr()
        assert lowerdeck(*given, "--quiet") == ExitStatus.DONE
        assert not drawn
        assert not capsys.readouterr().err
        with pytest.raises(ValueError, match="what it was"), without_bars():
            raise ValueError("what it was")
    finally:
        assert logging.set_tqdm_hook(before) is seen


def test_nobody_who_reads_the_steps_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Steps(shown=True).step("load", "loading"):
        pass
    assert not capsys.readouterr().out


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_written(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("lm", "export", llama, "-o", tmp_path / "model.pte", "--context", 8, "--check")
    assert lowerdeck(*given, PROMPT) == ExitStatus.BAD_INPUT
    error = capsys.readouterr().err
    assert "adds 16, and the context is 8: give a shorter prompt or a larger --context" in error
    assert lowerdeck(*given, "") == ExitStatus.BAD_INPUT
    assert "--check has a prompt of no tokens" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_context_that_is_cut_is_told(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("lm", "export", llama, "-o", tmp_path / "model.pte", "--context")
    assert lowerdeck(*given, 100_000) == ExitStatus.DONE
    told = capsys.readouterr().out
    assert "context        128, all that the model was made for, not 100000" in told
    assert lowerdeck(*given, 128) == ExitStatus.DONE
    assert "made for" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", ""])
def test_a_tokenizer_that_is_none_is_named_before_the_work(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "in")
    (tmp_path / "in/tokenizer.json").write_text(text)
    output = tmp_path / "model.pte"
    assert lowerdeck("lm", "export", tmp_path / "in", "-o", output) == ExitStatus.BAD_INPUT
    error = capsys.readouterr().err
    assert "tokenizer.json" in error
    assert "again" in error
    assert not output.exists()
