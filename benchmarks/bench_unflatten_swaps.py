"""Modules of real models replaced by eager's, one at a time, with and without signatures."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import torch
import transformers

from benchmarks.harness import Row
from lowerdeck.unflatten import UnflattenError
from tests.peers.module_swaps import plain_sweep, sweep
from tests.peers.transformer_models import CONFIGURED

PACKAGE = "unflatten"


def rows(quick: bool) -> Iterator[Row]:
    """Yield the swap table: a row for each model.

    Args:
        quick: A few models.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    all_found: Counter[str] = Counter()
    all_plain: Counter[str] = Counter()
    for item in CONFIGURED[:3] if quick else CONFIGURED:
        torch.manual_seed(0)
        eager, args = item.build(transformers), item.calls()[0]
        with torch.no_grad():
            found, _ = sweep(eager, args)
            try:
                plain = plain_sweep(eager, args)
            except UnflattenError:
                plain = Counter(failed=1)
        all_found += found
        all_plain += plain
        yield _row(item.model, found, plain)
    yield _row("all of these models", all_found, all_plain)


def _row(name: str, found: Counter[str], plain: Counter[str]) -> Row:
    tried = found["right"] + found["wrong"] + found["refused"]
    share, plain_share = 100 * found["right"] / tried, 100 * plain["right"] / plain.total()
    wrong = found["wrong"] + found["alone, wrong"] + found["changed, wrong"]
    met = share >= 99 and not wrong and not plain["wrong"]
    note = (
        f"of {tried}: {found['refused']} refused, {wrong} wrong; peer: a plain "
        f"export, of {plain.total()}: {plain['refused']} refused, {plain['wrong']} wrong"
    )
    goal = ">= 99 %, 0 wrong"
    return Row(PACKAGE, f"swaps, {name}", share, plain_share, "% right", goal, met, note)
