"""``lowerdeck inspect FILE``: show the contents of a `.pte` or `.ptd` file."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowerdeck.inspect.commands.answers import (
    CommandError,
    ExitStatus,
    reading,
    say,
    share_text,
    size_text,
    writing,
)
from lowerdeck.inspect.commands.external import external_lines, is_external, summarise_external
from lowerdeck.inspect.commands.paths import check_paths
from lowerdeck.inspect.commands.summary import summarise
from lowerdeck.inspect.report.documents import html_report
from lowerdeck.serializer import PteFile, TraceError, open_ptd, open_pte, write_pieces

_BAR = 40
_NAME = 20
_MOST_ROWS = 20


class InspectCommand:
    """Shows methods, operators, delegates, memory, and the size of each part of the file."""

    help = "show what a .pte or .ptd file contains"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("file", type=Path, metavar="FILE", help="a .pte or .ptd file")
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print it as JSON")
        form.add_argument(
            "--html", type=Path, metavar="OUT", help="write it as a self-contained HTML page"
        )
        parser.add_argument(
            "--trace",
            type=Path,
            metavar="FILE",
            help="with --html: a trace from `lowerdeck run --trace FILE`; shows its times",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the summary, or write the page.

        Returns:
            0.

        Raises:
            CommandError: The file is malformed or cannot be opened, a page was requested for a
                `.ptd`, or the page cannot be written or would replace the file.
        """
        check_paths(
            read=[("FILE", args.file), ("--trace", args.trace)], written=[("--html", args.html)]
        )
        if args.trace is not None and args.html is None:
            raise CommandError(
                "--trace needs --html: the trace is shown only on the page", ExitStatus.USAGE
            )
        with reading(args.file):
            external = is_external(args.file)
        if external:
            return self._external(args)
        with reading(args.file), open_pte(args.file) as file:
            summary = summarise(file)
            page = None if args.html is None else _page(file, args)
        if page is not None:
            write_page(page, args.html)
        elif args.json:
            say(*json.dumps(summary, indent=2).splitlines())
        else:
            say(*summary_lines(args.file.name, summary))
        return ExitStatus.DONE

    @staticmethod
    def _external(args: argparse.Namespace) -> int:
        if args.html is not None:
            raise CommandError(
                f"found external data in {args.file}, expected a program for a page: omit "
                "--html, or use --json",
                ExitStatus.USAGE,
            )
        with reading(args.file), open_ptd(args.file) as file:
            summary = summarise_external(file, args.file.stat().st_size)
        if args.json:
            say(*json.dumps(summary, indent=2).splitlines())
        else:
            say(*external_lines(args.file.name, summary))
        return ExitStatus.DONE


def trace_text(path: Path) -> str:
    """Return the text of a trace.

    Raises:
        CommandError: The trace cannot be read.
    """
    with reading(path):
        return path.read_text(encoding="utf-8", errors="replace")


def _page(file: PteFile, args: argparse.Namespace) -> str:
    trace = None if args.trace is None else trace_text(args.trace)
    try:
        return html_report(file, title=args.file.name, trace=trace)
    except TraceError as error:
        raise CommandError(f"--trace {args.trace}: {error}") from error


def write_page(page: str, path: Path) -> None:
    """Write a page and print its path.

    Raises:
        CommandError: The page cannot be written.
    """
    with writing(path):
        write_pieces([page.encode()], path)
    say(f"wrote {path}")


def summary_lines(name: str, summary: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the text output."""
    header = "with segments" if summary["header"] else "one FlatBuffer without segments"
    yield f"{name}: {size_text(summary['size'])}, schema version {summary['version']}, {header}"
    if summary["needs"] is not None:
        needs = summary["needs"]
        yield f"needs ExecuTorch {needs['release']} or later: {needs['reason']}"
    for method in summary["methods"]:
        yield ""
        yield from _method_lines(method)
    if summary["kernel_libraries"]:
        yield ""
        yield "kernels that the application must link"
        for library, operators in summary["kernel_libraries"].items():
            yield from _cut([f"  {library}: {name}" for name in operators])
    if summary["delegates"]:
        yield ""
        yield "delegates"
        yield from _cut([_delegate_text(entry) for entry in summary["delegates"]])
    yield ""
    yield "sizes of the parts of the file"
    yield from _section_lines(summary)


def _method_lines(method: dict[str, Any]) -> Iterator[str]:
    yield f"method {method['name']}"
    for kind in ("inputs", "outputs"):
        texts = [f"    {index}: {value['text']}" for index, value in enumerate(method[kind])]
        yield f"  {kind}" if texts else f"  {kind}: none"
        yield from _cut(texts)
    steps = ", ".join(f"{count} {kind}" for kind, count in method["instructions"].items())
    yield f"  instructions: {steps or 'none'}; values: {method['values']}"
    memory = ", ".join(f"{size_text(m['size'])} (id {m['id']})" for m in method["planned_memory"])
    yield f"  planned memory: {memory or 'none'}"
    if method["operators"]:
        yield "  operators"
        yield from _cut([f"    {n:6d}  {name}" for name, n in method["operators"].items()])


def _delegate_text(entry: dict[str, Any]) -> str:
    location = "inline" if entry["location"] == "INLINE" else "segment"
    parts = [f"  {entry['id']} in {entry['method']}: {size_text(entry['size'])}, {location}"]
    if entry["compile_specs"]:
        parts.append(", ".join(f"{key}={text!r}" for key, text in entry["compile_specs"].items()))
    payload = entry["payload"]
    if payload is None:
        return "; ".join([*parts, f"not opened, as {entry['closed']}"])
    named = ", ".join(f"{count} {name}" for name, count in payload["operators"].items())
    parts += [named or "no operators", f"constants {size_text(payload['constant_bytes'])}"]
    return "; ".join(parts)


def _section_lines(summary: dict[str, Any]) -> Iterator[str]:
    """Yield one line per kind of section, largest first: there may be thousands of segments.

    Bytes that two segments share, such as a tied weight, count for the first segment.
    """
    file_size = summary["size"]
    sizes: Counter[str] = Counter()
    shared: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    end = 0
    for section in summary["sections"]:  # by offset
        kind, section_end = section["kind"], section["offset"] + section["size"]
        own = max(0, section_end - max(section["offset"], end))
        sizes[kind] += own
        shared[kind] += section["size"] - own
        counts[kind] += 1
        end = max(end, section_end)
    padding = file_size - sum(sizes.values())
    if padding > 0:
        sizes["padding"] = padding
    constants, state = summary["constants"]["count"], summary["state"]["count"]
    names = {
        "program": "program",
        "constants": f"constants ({constants})",
        "state": f"initial values ({state})",
        "delegate": f"delegate blobs ({counts['delegate']})",
        "named": f"named blobs ({counts['named']})",
        "padding": "padding",
    }
    for kind, size in sizes.most_common():
        bar = "█" * round(_BAR * size / file_size) if file_size else ""
        share = share_text(size, file_size)
        name = names.get(kind, kind)
        if shared[kind]:
            name += f", {size_text(shared[kind])} shared"
        yield f"  {size_text(size):>9}  {share:>7}  {name:<{_NAME}}  {bar}".rstrip()


def _cut(rows: list[str]) -> Iterator[str]:
    yield from rows[:_MOST_ROWS]
    if len(rows) > _MOST_ROWS:
        yield f"    ... and {len(rows) - _MOST_ROWS} more (--json shows all)"


command: InspectCommand = InspectCommand()
