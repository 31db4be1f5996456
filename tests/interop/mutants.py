"""Damaged files that ``verify_pte`` accepts must not end or hang the official runtime.

Mutants of files are verified; the accepted ones run from bytes and from a path in a forked
process, with inputs made from what the mutant says of them. As a script this is the session
``mutants``: it goes on where the last run of a shard stopped, and sums up its figures.

    python tests/interop/mutants.py --count 10000 --state out/mutants FOLDER...
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowerdeck import serializer as pte
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import to_backend
from lowerdeck.xnnpack import XnnpackPartitioner

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lowerdeck_zoo import Of, official
from tests.interop.forks import run_in_fork

SECONDS = 60
"""Of CPU time for a batch: one that takes longer has a mutant that hangs."""
_BATCH = 64
_NUMBERS = (0, 1, 2, 3, 4, 7, -1, -2, 16, 255, 256, 65536, 2**31 - 1, -(2**31), 2**40, 2**62)
_FLOATS = (0.0, 1.0, -1.5, 1e300, float("inf"), float("nan"))
_DTYPES = {
    pte.ScalarType[name]: getattr(torch, torch_name)
    for name, torch_name in (
        *(("FLOAT", "float32"), ("DOUBLE", "float64"), ("HALF", "float16"), ("BOOL", "bool")),
        *(("LONG", "int64"), ("INT", "int32"), ("SHORT", "int16"), ("CHAR", "int8")),
        *(("BYTE", "uint8"), ("UINT16", "uint16"), ("UINT32", "uint32"), ("UINT64", "uint64")),
        *(("BFLOAT16", "bfloat16"), ("COMPLEX_FLOAT", "complex64")),
        ("COMPLEX_DOUBLE", "complex128"),
    )
}
Calls = list[tuple[str, list[Any]]]


def mutant(file: bytes, seed: int) -> bytes | None:
    """Return the file with something changed, or None where the change cannot be written.

    Args:
        file: A good file.
        seed: Chooses what is changed and how; the same for the same change.
    """
    chance = random.Random(seed)
    kind = seed % 4
    if kind == 0:
        return _bytes_changed(file, chance)
    program = pte.deserialize_pte(file)
    if kind == 1 and program.backend_delegate_data:
        blobs = program.backend_delegate_data
        number = chance.randrange(len(blobs))
        blobs[number] = pte.BackendDelegateInlineData(
            _bytes_changed(bytes(blobs[number].data), chance)
        )
    else:
        for _ in range(chance.choice((1, 1, 2))):
            _change_field(program, chance)
    try:
        return pte.serialize_pte(program)
    except (pte.FormatError, ValueError, OverflowError, TypeError):
        return None


def _bytes_changed(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    if not changed:
        return data
    # Of a large file only the beginning is structure; the rest is weights.
    reach = min(len(changed), 1 << 14)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(reach)
        way = chance.randrange(4)
        if way == 0:
            changed[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            at &= ~3
            changed[at : at + 4] = (chance.choice(_NUMBERS) % 2**32).to_bytes(4, "little")
        elif way == 2:
            at &= ~3
            word = int.from_bytes(changed[at : at + 4], "little") + chance.choice((-4, -1, 1, 4))
            changed[at : at + 4] = (word % 2**32).to_bytes(4, "little")
        else:
            start, size = chance.randrange(reach) & ~3, chance.choice((4, 8, 16, 64))
            changed[at & ~3 : (at & ~3) + size] = changed[start : start + size]
    return bytes(changed[: len(data)]).ljust(len(data), b"\0")


def _change_field(program: pte.Program, chance: random.Random) -> None:
    """Change one field of one record of one method, or swap two of a list."""
    records = list(_records(chance.choice(program.execution_plan)))
    owner, name = chance.choice(records)
    value = getattr(owner, name)
    if isinstance(value, list):
        if value and isinstance(value[0], (int, float)):
            _change_list(value, chance)
        elif len(value) > 1:
            one, other = chance.randrange(len(value)), chance.randrange(len(value))
            value[one], value[other] = value[other], value[one]
        return
    setattr(owner, name, _changed(value, chance))


def _change_list(value: list[Any], chance: random.Random) -> None:
    at, way = chance.randrange(len(value)), chance.randrange(4)
    if way == 0:
        value.pop(at)
    elif way == 1:
        value.insert(at, chance.choice(value))
    elif way == 2:
        value[at] = _changed(value[at], chance)
    else:
        value[at] = type(value[at])(max(0, value[at] + chance.choice((-1, 1))))


def _changed(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, pte.ScalarType):
        return chance.choice(list(_DTYPES))
    if type(value) is int:
        return chance.choice((*_NUMBERS, value + 1, value - 1, value * 2))
    if isinstance(value, float):
        return chance.choice(_FLOATS)
    return value


def _records(record: Any) -> Iterator[tuple[Any, str]]:
    for item in fields(record):
        value = getattr(record, item.name)
        yield record, item.name
        for each in value if isinstance(value, list) else [value]:
            # Frames of stack traces are frozen, and nothing reads them.
            if is_dataclass(each) and not isinstance(each, type | pte.Frame):
                yield from _records(each)


def calls_of(program: pte.Program) -> Calls:
    """Return one call of each method, with inputs such as the method says it takes."""
    chance = torch.Generator().manual_seed(1)
    calls: Calls = []
    for plan in program.execution_plan[:4]:
        inputs: list[Any] = []
        for index in plan.inputs:
            value = plan.values[index].val
            if isinstance(value, pte.Tensor):
                inputs.append(_tensor(value, chance))
            elif isinstance(value, pte.Int | pte.Bool | pte.Double | pte.String):
                inputs.append(getattr(value, fields(value)[0].name))
            elif isinstance(value, pte.Null):
                inputs.append(None)
        calls.append((plan.name, inputs))
    return calls


def _tensor(value: pte.Tensor, chance: torch.Generator) -> Any:
    dtype = _DTYPES.get(value.scalar_type)
    if dtype is None or value.nbytes > 1 << 28:
        return 0
    numbers = torch.rand(list(value.sizes), generator=chance)
    tensor = (numbers * 2).to(dtype)
    return tensor.contiguous(memory_format=torch.channels_last) if _is_last(value) else tensor


def _is_last(value: pte.Tensor) -> bool:
    return value.dim_order == [0, 2, 3, 1]


def run_batch(files: Sequence[tuple[bytes, Calls]], folder: Path) -> list[str]:
    """Return what became of each file: ``ran``, ``error``, or ``crash`` with the signal.

    Args:
        files: Files with the calls to make.
        folder: Where to write them for loading from a path.
    """
    found: list[str] = []
    while len(found) < len(files):
        rows, failed = run_in_fork(partial(_outcomes, files[len(found) :], folder), SECONDS, 2)
        found += [row["outcome"] for row in rows]
        if len(found) < len(files):
            found.append("hang" if "no end" in failed else f"crash {failed}")
    return found


def _outcomes(files: Sequence[tuple[bytes, Calls]], folder: Path) -> Iterator[dict[str, str]]:
    faulthandler.disable()  # pytest's own, which would print a traceback at an expected abort
    # Only here: the tests' own process never loads the runtime.
    lib = importlib.import_module(str(official.binding_name()))
    path = folder / "mutant.pte"
    for file, calls in files:
        path.unlink(missing_ok=True)
        path.write_bytes(file)
        made = [official.Call(tuple(inputs), method) for method, inputs in calls]
        outcomes = {_outcome(lib, source, made) for source in (file, path)}
        yield {"outcome": "ran" if outcomes == {"ran"} else "error"}


def _outcome(lib: Any, source: bytes | Path, calls: Sequence[official.Call]) -> str:
    """Load a file without the runtime's own checks, and make all calls, whatever they end with."""
    cases = [
        official.Case(source, some, verify=False) for some in [[one] for one in calls] or [[]]
    ]
    found = {type(official.run_here(lib, case)) for case in cases}
    return "ran" if found == {official.Ran} else "error"


def search(
    files: Sequence[tuple[str, bytes]], seeds: Sequence[int], folder: Path
) -> tuple[Counter[str], list[tuple[str, int, str]]]:
    """Return figures, and the file, seed and outcome of each mutant that crashes or hangs.

    Args:
        files: Names and bytes of good files; mutant ``seed`` is of file ``seed % len(files)``.
        seeds: Which mutants to make.
        folder: A folder for mutants to be loaded from.
    """
    figures: Counter[str] = Counter()
    bad: list[tuple[str, int, str]] = []
    waiting: list[tuple[str, int, bytes, Calls]] = []

    def settle() -> None:
        outcomes = run_batch([(data, calls) for _, _, data, calls in waiting], folder)
        for (name, seed, _, _), outcome in zip(waiting, outcomes, strict=True):
            figures[outcome.partition(" ")[0]] += 1
            if outcome.startswith(("crash", "hang")):
                bad.append((name, seed, outcome))
        waiting.clear()

    for seed in seeds:
        name, file = files[seed % len(files)]
        data = mutant(file, seed // len(files))
        figures["made"] += 1
        if data is None or data == file:
            figures["not written"] += 1
            continue
        try:
            hazards: list[pte.Hazard] = []
            program = pte.verify_pte(data, on_hazard=hazards.append)
        except pte.FormatError:
            figures["refused"] += 1
            continue
        if any(hazard.needs for hazard in hazards):
            # It has lost data that another file may bring: verify says that it dies without.
            figures["warned"] += 1
            continue
        figures["accepted"] += 1
        waiting.append((name, seed, data, calls_of(program)))
        if len(waiting) == _BATCH:
            settle()
    settle()
    return figures, bad


def _indexed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Call kernels that trust some of their arguments."""
    pooled = nn.functional.max_pool2d(x, 2)
    return x[:, [0, 1]], pooled.amax((2, 3)), torch.bmm(x[:, 0], x[:, 1]), x.cumsum(1)


def good_files() -> list[tuple[str, bytes]]:
    """Return small files: portable kernels, and XNNPACK payloads with linear and convolution."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        image, rows = torch.randn(1, 3, 6, 6), torch.randn(2, 4)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        layers = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3))
    files = []
    for name, model, given in (
        ("indexed", Of(_indexed), image),
        ("net", net, image),
        ("layers", layers, rows),
    ):
        exported = torch.export.export(model.eval(), (given,))
        files.append((name, emit(exported).to_bytes()))
        if name != "indexed":
            delegated = to_backend(exported, XnnpackPartitioner())
            files.append((f"{name} in XNNPACK", emit(delegated).to_bytes()))
    return files


def main() -> int:
    """Search on from where the shard stopped; the exit status is 1 where a mutant is bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th block from the I-th")
    parser.add_argument("--state", type=Path, required=True)
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    options.state.mkdir(parents=True, exist_ok=True)
    state = options.state / f"shard-{shard}-of-{shards}.json"
    known = json.loads(state.read_text()) if state.exists() else {"next": 0, "sum": {}, "bad": []}
    paths = sorted(path for folder in options.folders for path in folder.glob("*.pte"))
    files = [*good_files(), *((path.name, path.read_bytes()) for path in paths)]
    figures, bad = Counter[str](known["sum"]), known["bad"]
    with tempfile.TemporaryDirectory() as folder:
        while known["next"] * shards * _BATCH < options.count:
            first = (known["next"] * shards + shard) * _BATCH
            more, worse = search(files, range(first, first + _BATCH), Path(folder))
            figures.update(more)
            bad += worse
            known = {"next": known["next"] + 1, "sum": dict(figures), "bad": bad}
            state.write_text(json.dumps(known))
    print(dict(figures))
    for one in bad:
        print(*one)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
