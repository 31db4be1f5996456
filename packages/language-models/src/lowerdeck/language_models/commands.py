"""The command ``lowerdeck lm``: export a language model, and generate text with it."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

from tokenizers import Tokenizer

from lowerdeck.inspect import CommandError, ExitStatus, check_paths, say, writing
from lowerdeck.language_models.checking import check_lines, check_prompt
from lowerdeck.language_models.errors import FolderError, GenerationError, first_line
from lowerdeck.language_models.exporting import (
    ATTENTIONS,
    BACKENDS,
    QUANTIZATIONS,
    lower_decoder,
    prepared,
)
from lowerdeck.language_models.folder import TOKENIZER, tokenizer_json
from lowerdeck.language_models.generating import Timing, generate, open_model
from lowerdeck.language_models.steps import Steps, without_bars
from lowerdeck.runner import official_binding_name
from lowerdeck.serializer import printable

RUNTIMES = ("official", "lowerdeck")
_KIND = b"ET12"
"""File identifier of programs, at byte 4."""


class LanguageModelCommand:
    """Export and run language models."""

    help = "export, quantise and run language models"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of ``lm export`` and ``lm run``.

        Args:
            parser: The parser of this command.
        """
        forms = parser.add_subparsers(dest="form", required=True, metavar="export|run")
        _configure_export(forms.add_parser("export", help="export a folder to a .pte file"))
        _configure_run(forms.add_parser("run", help="continue a text"))

    def run(self, args: argparse.Namespace) -> int:
        """Run the command, and return the exit status.

        Returns:
            ``DONE``; ``DIFFERS`` if ``--check`` fails.

        Raises:
            LanguageModelError: The folder, the file or the prompt cannot be used.
            lowerdeck.inspect.CommandError: A file cannot be written, or ``--runtime official`` is
                given without executorch.
        """
        return _export(args) if args.form == "export" else _run(args)


lm: LanguageModelCommand = LanguageModelCommand()


def _configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a model folder, as from save_pretrained"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("model.pte"),
        metavar="FILE",
        help="the .pte file to write (by default model.pte)",
    )
    parser.add_argument(
        "--quantize", choices=QUANTIZATIONS, default="none", help="quantisation of linear layers"
    )
    parser.add_argument(
        "--group", type=int, default=32, metavar="N", help="weights that share a scale in 8da4w"
    )
    parser.add_argument(
        "--quantize-embedding",
        choices=("none", "8", "4"),
        default="none",
        help="bits of the embedding; the application must link quantized_ops_lib",
    )
    parser.add_argument(
        "--context", type=int, default=2048, metavar="N", help="largest number of tokens of a text"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="xnnpack",
        help="by default xnnpack; portable: only the runtime's own kernels",
    )
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        default="delegate",
        help="custom-kernel: llama::custom_sdpa; the application must link custom_ops",
    )
    parser.add_argument(
        "--prefill-chunk", type=int, metavar="N", help="largest number of tokens in one call"
    )
    parser.add_argument(
        "--separate-decode",
        action="store_true",
        help="add a method `decode` for exactly one token, with the same weights and cache",
    )
    parser.add_argument(
        "--check",
        type=_text,
        metavar="PROMPT",
        help="generate from the file; fail if it differs from the model beyond rounding",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not report progress")
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of `lm export`")
    parser.add_argument("prompt", type=_text, metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="the model's folder, or a tokenizer.json; by default the one exported with FILE",
    )
    parser.add_argument(
        "--tokens", type=int, default=64, metavar="N", help="largest number of tokens to generate"
    )
    parser.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="by default the official one if it is installed, else lowerdeck",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")


def _text(text: str) -> str:
    """Return an argument decoded as UTF-8, whatever the locale."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise argparse.ArgumentTypeError(
            f"{printable(text)} is not UTF-8 text, as tokenizers require"
        ) from error


def _export(args: argparse.Namespace) -> int:
    tokenizer_file = tokenizer_beside(args.output)
    if not args.folder.is_dir():
        raise FolderError(
            f"{args.folder} is not a folder, expected a Hugging Face model folder, as from `hf "
            "download NAME --local-dir FOLDER` or save_pretrained"
        )
    # The file may be in the model's folder, but must not replace one of the model's files.
    models = [file for file in args.folder.iterdir() if file.suffix != ".pte"]
    read = [(f"{file.name} of FOLDER", str(file)) for file in models]
    check_paths(read=[("FOLDER", args.folder), *read], written=[("--output", args.output)])
    # Cheap checks first: text generation requires a tokenizer.
    tokenizer = tokenizer_json(args.folder)
    words = _parsed(tokenizer, args.folder / TOKENIZER)
    prompt = None if args.check is None else words.encode(args.check).ids
    steps = Steps(visible=not args.quiet)
    bits = None if args.quantize_embedding == "none" else int(args.quantize_embedding)
    with without_bars() if args.quiet else nullcontext():
        prepared_model = prepared(
            args.folder,
            quantize=args.quantize,
            group=args.group,
            quantize_embedding=bits,
            context=args.context,
            backend=args.backend,
            attention=args.attention,
            prefill_chunk=args.prefill_chunk,
            separate_decode=args.separate_decode,
            steps=steps,
        )
    if prompt is not None:
        check_prompt(prompt, prepared_model.context)
    lowered = lower_decoder(prepared_model, steps)
    with writing(args.output), steps.step("write", f"writing {args.output}"):
        size = lowered.save(args.output)
    with writing(tokenizer_file):
        tokenizer_file.write_text(tokenizer, encoding="utf-8")
    delegates = sum(lowered.delegation("forward").delegates.values())
    say(
        f"{args.output}: {size / 1e6:.1f} MB, {delegates} delegate{'s'[: delegates != 1]}, up to "
        f"{prepared_model.context} tokens, {prepared_model.chunk} at once; tokenizer in "
        f"{tokenizer_file}",
        "time           "
        + ", ".join(f"{step} {spent:.2f} s" for step, spent in steps.seconds.items()),
    )
    if prepared_model.context < args.context:
        say(f"context        {prepared_model.context}, the model's limit, not {args.context}")
    if prepared_model.quantized is not None:
        say(f"quantised      {prepared_model.quantized.line()}")
    if prepared_model.kernels:
        say(f"needs kernels  {', '.join(sorted(prepared_model.kernels))}: link their libraries")
    if prompt is None:
        return ExitStatus.DONE
    with steps.step("check", "checking its tokens"):
        is_equal, lines = check_lines(prepared_model.decoder, open_model(args.output), prompt)
    say(*lines)
    return ExitStatus.DONE if is_equal else ExitStatus.DIFFERS


def _run(args: argparse.Namespace) -> int:
    is_installed = official_binding_name() is not None
    official = is_installed if args.runtime is None else args.runtime == "official"
    if official and not is_installed:
        raise CommandError(
            "--runtime official requires executorch: pip install --no-deps executorch",
            ExitStatus.FAILED,
        )
    if args.tokens < 1:
        raise GenerationError(f"--tokens is {args.tokens}, expected at least 1")
    tokenizer = _tokenizer(args.tokenizer, args.file)
    model = open_model(args.file)
    timing = Timing()
    tokens_out: list[int] = []
    printed = ""
    for token in generate(
        model, tokenizer.encode(args.prompt).ids, args.tokens, official=official, timing=timing
    ):
        tokens_out.append(token)
        text = tokenizer.decode(tokens_out)
        # A character may take several tokens: print it once it is complete.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(printable(text[len(printed) :]), end="", flush=True)
            printed = text
    print(printable(tokenizer.decode(tokens_out)[len(printed) :]))
    rate = timing.tokens / timing.seconds if timing.seconds else 0.0
    say(
        f"{timing.prompt_tokens} tokens read in {timing.prompt_seconds * 1e3:.1f} ms, "
        f"{timing.tokens} more at {rate:.1f} tokens/s, in {timing.runtime}"
    )
    return ExitStatus.DONE


def tokenizer_beside(file: Path) -> Path:
    """Return the path of the tokenizer next to a model's file.

    Raises:
        FolderError: ``file`` has no name, such as ``/`` or ``.``.
    """
    if not file.name:
        raise FolderError(f"{str(file)!r} is a folder, expected a model's file")
    return file.with_name(f"{file.stem}.tokenizer.json")


def _tokenizer(path: Path | None, file: Path) -> Tokenizer:
    if path is None:
        path = tokenizer_beside(file)
        if file.is_dir():
            raise FolderError(
                f"{file} is a folder, expected a .pte file: use `lowerdeck lm export {file}`"
            )
        if not file.is_file():
            raise FolderError(f"there is no file {file}, expected one from `lowerdeck lm export`")
        with file.open("rb") as opened:
            if opened.read(8)[4:] != _KIND:
                raise FolderError(
                    f"{file} is not a .pte file, expected one from `lowerdeck lm export`"
                )
        if not path.is_file():
            raise FolderError(f"there is no {path}: give the model's folder with --tokenizer")
    text = tokenizer_json(path) if path.is_dir() else _read(path)
    return _parsed(text, path)


def _parsed(text: str, file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        raise FolderError(
            f"{file} is not a tokenizer ({first_line(error)}): download the model's tokenizer "
            "again"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} cannot be read: {error}") from error
