"""``lowerdeck diff A B``: compare the contents of two `.pte` files, not their bytes."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowerdeck.inspect.commands.answers import CommandError, ExitStatus, reading, say, size_text
from lowerdeck.inspect.commands.inspect import trace_text, write_page
from lowerdeck.inspect.commands.paths import check_paths
from lowerdeck.inspect.commands.summary import summarise
from lowerdeck.inspect.report.changes import method_changes, stored_changes
from lowerdeck.inspect.report.documents import html_diff
from lowerdeck.inspect.report.embed import clip
from lowerdeck.inspect.report.pairing import pair_rows
from lowerdeck.serializer import ContainerMetadata, PteFile, TraceError, open_pte

_MOST_LINES = 40


class DiffCommand:
    """Compares methods, instructions, memory, delegates and stored data."""

    help = "compare two .pte files"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of the command."""
        parser.add_argument("old", type=Path, metavar="A", help="a .pte file")
        parser.add_argument("new", type=Path, metavar="B", help="the .pte file to compare it with")
        parser.add_argument(
            "--html", type=Path, metavar="OUT", help="write an HTML page that compares both"
        )
        parser.add_argument(
            "--traces",
            type=Path,
            nargs=2,
            metavar="FILE",
            help="with --html: traces of A and B from `lowerdeck run --trace FILE` with the same "
            "inputs; shows the error of B's results relative to A's",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the differences, or write the page.

        Returns:
            0 if the files are equivalent, else 1.

        Raises:
            CommandError: A file is malformed or cannot be opened, or the page cannot be written or
                would replace one of the files.
        """
        traces = args.traces or []
        check_paths(
            read=[("A", args.old), ("B", args.new), *(("--traces", trace) for trace in traces)],
            written=[("--html", args.html)],
        )
        if traces and args.html is None:
            raise CommandError(
                "--traces needs --html: traces are shown only on the page", ExitStatus.USAGE
            )
        with ExitStack() as stack:
            old, new = (_open(path, stack) for path in (args.old, args.new))
            lines = list(difference_lines(old, new))
            if args.html is not None:
                write_page(_page(old, new, args), args.html)
        say(*(lines or ["no difference in meaning"]))
        return ExitStatus.DIFFERS if lines else ExitStatus.DONE


def _page(old: PteFile, new: PteFile, args: argparse.Namespace) -> str:
    old_trace, new_trace = map(trace_text, args.traces) if args.traces else (None, None)
    traces = None if old_trace is None or new_trace is None else (old_trace, new_trace)
    try:
        return html_diff(old, new, titles=(args.old.name, args.new.name), traces=traces)
    except TraceError as error:
        raise CommandError(f"--traces: {error}") from error


def _open(path: Path, stack: ExitStack) -> PteFile:
    """Open a file and decode the compared parts, so that errors name the file."""
    with reading(path):
        file = stack.enter_context(open_pte(path))
        summarise(file)
    return file


def difference_lines(old: PteFile, new: PteFile) -> Iterator[str]:
    """Yield a line for each difference between two files.

    The layout of bytes (alignment, order of segments, sharing) is ignored.

    Raises:
        FormatError: A file is malformed.
    """
    left, right = summarise(old), summarise(new)
    if left["version"] != right["version"]:
        yield f"schema version: {left['version']} -> {right['version']}"
    programs = old.program(), new.program()
    names = [{method["name"]: None for method in side["methods"]} for side in (left, right)]
    only = [[name for name in names[side] if name not in names[not side]] for side in (0, 1)]
    if len(only[0]) == len(only[1]) == 1:
        (before,), (after,) = only
        yield f"method {before}: renamed to {after}; both are compared as {before}"
        entries = [(method, "name") for method in right["methods"]]
        entries += [(delegate, "method") for delegate in right["delegates"]]
        for entry, key in entries:
            entry[key] = before if entry[key] == after else entry[key]
        plans = [
            replace(plan, name=before) if plan.name == after else plan
            for plan in programs[1].execution_plan
        ]
        programs = programs[0], replace(programs[1], execution_plan=plans)
    changes = {change["name"]: change["rows"] for change in method_changes(*programs)}
    structures = [
        {plan.name: plan.container_meta_type for plan in program.execution_plan}
        for program in programs
    ]
    methods = {m["name"]: m for m in left["methods"]}, {m["name"]: m for m in right["methods"]}
    for name in [*methods[0], *(name for name in methods[1] if name not in methods[0])]:
        if name not in methods[1]:
            yield f"method {name}: removed"
        elif name not in methods[0]:
            yield f"method {name}: added"
        else:
            yield from _structure_differences(name, *(side[name] for side in structures))
            yield from _method_differences(methods[0][name], methods[1][name])
            rows = changes.get(clip(name), [])
            removed, added = sum(b < 0 for _, b in rows), sum(a < 0 for a, _ in rows)
            if rows and removed + added:
                yield f"method {name}: {removed} instructions removed, {added} added"
    yield from _payload_differences(left, right)
    before, after = _of_delegates(left), _of_delegates(right)
    for word, gone in (("removed", before - after), ("added", after - before)):
        yield from (f"delegate {word}: {text}" for text in sorted(gone.elements()))
    for entry in stored_changes(*programs):
        if entry["kind"] == "delegate" and entry["change"] != "changed":
            continue  # shown above, with its settings
        kind, name = entry["kind"], entry["name"]
        label = name if name.startswith(f"{kind} ") else f"{kind} {name}"
        sizes = f"{size_text(entry['old'])} -> {size_text(entry['new'])}"
        yield f"{label}: {entry['change']}, {sizes}"


def _structure_differences(name: str, *sides: ContainerMetadata | None) -> Iterator[str]:
    """Yield a line for each difference in the structure of inputs or outputs."""
    for field, label in (("encoded_inp_str", "inputs"), ("encoded_out_str", "outputs")):
        texts = [str(getattr(side, field, "")) for side in sides]
        if texts[0] != texts[1]:
            yield f"method {name}: structure of {label}: {clip(texts[0])} -> {clip(texts[1])}"


def _method_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    name = old["name"]
    for kind in ("inputs", "outputs"):
        if old[kind] != new[kind]:
            texts = [", ".join(value["text"] for value in side[kind]) for side in (old, new)]
            yield f"method {name}: {kind}: ({texts[0]}) -> ({texts[1]})"
    if old["planned_memory"] != new["planned_memory"]:
        sizes = [sum(m["size"] for m in side["planned_memory"]) for side in (old, new)]
        yield f"method {name}: planned memory: {size_text(sizes[0])} -> {size_text(sizes[1])}"
    for operator in sorted({*old["operators"], *new["operators"]}):
        counts = old["operators"].get(operator, 0), new["operators"].get(operator, 0)
        if counts[0] != counts[1]:
            yield f"method {name}: {operator}: {counts[0]} -> {counts[1]} calls"


def _payload_differences(left: dict[str, Any], right: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each operator that differs between delegates at the same position."""
    olds, news = _payloads(left), _payloads(right)
    for name, number in [key for key in olds if key in news and olds[key] != news[key]]:
        old, new = olds[name, number], news[name, number]
        rows = pair_rows(old, new)
        lines = [f"- {old[a]}" if b < 0 else f"+ {new[b]}" for a, b in rows if a < 0 or b < 0]
        label = f"method {name}: delegate {number}"
        yield from (f"{label}: {line}" for line in lines[:_MOST_LINES])
        if len(lines) > _MOST_LINES:
            yield f"{label}: ... and {len(lines) - _MOST_LINES} more operators"


def _payloads(summary: dict[str, Any]) -> dict[tuple[str, int], list[str]]:
    """Return the operators of each readable delegate, by method and index in the method."""
    counts: Counter[str] = Counter()
    payloads = {}
    for entry in summary["delegates"]:
        key = entry["method"], counts[entry["method"]]
        counts[entry["method"]] += 1
        if entry["payload"] is not None:
            payloads[key] = entry["payload"]["nodes"]
    return payloads


def _of_delegates(summary: dict[str, Any]) -> Counter[str]:
    return Counter(
        f"{entry['id']} in {entry['method']}, {size_text(entry['size'])}"
        + (f", compile specs {entry['compile_specs']}" if entry["compile_specs"] else "")
        for entry in summary["delegates"]
    )


command: DiffCommand = DiffCommand()
