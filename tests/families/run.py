"""Export every family of decoders that transformers knows: resumable, each in a fork.

    nox -s families -- [FAMILY...] [--records FILE] [--write]

Each is a small model with random weights, made of its configuration. A file that gives the tokens
that the model gives by itself, without a cache, is "same". What is recorded is not run again;
``--write`` writes the page.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

from lowerdeck.language_models import UnsupportedModelError
from lowerdeck.language_models.checking import check_lines
from lowerdeck.language_models.exporting import lower_decoder, prepared
from lowerdeck.language_models.generating import open_model
from tests import resumable
from tests.families.small_models import FAMILIES, NoModelError, build
from tests.interop.forks import run_in_fork

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/language-model-families.md"
SECONDS = 150
_WAITS = 5
PROMPT = (105, 109, 117, 133)
SETTINGS: dict[str, Any] = {
    "quantize": "none",
    "group": 32,
    "quantize_embedding": None,
    "context": 48,
    "backend": "xnnpack",
    "attention": "delegate",
    "prefill_chunk": None,
    "separate_decode": False,
}
WELL = frozenset({"same", "refused", "no model"})
"""Outcomes that are no fault of ours."""
SAID = {
    "same": "work: the file generates the model's tokens",
    "refused": "are rejected, with the reason",
    "no model": "were not tried: the configuration's defaults give no small model",
    "wrong": "give other tokens",
    "failed": "fail otherwise",
}

Record = Mapping[str, Any]


def of_family(family: str) -> Record:
    """Return what came of one family, tried in a fork of this process."""
    found, failed = run_in_fork(lambda: [_tried(family)], SECONDS, _WAITS)
    said = found[0] if found else {"outcome": "failed", "why": failed}
    return {"family": family, **said}


def _tried(family: str) -> Record:
    try:
        model = build(family)
        made = prepared(model, **SETTINGS)
        lowered = lower_decoder(made)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "model.pte")
            lowered.save(file)
            right, lines = check_lines(made.decoder, open_model(file), PROMPT)
    except NoModelError as error:
        return {"outcome": "no model", "why": str(error)}
    except UnsupportedModelError as error:
        return {"outcome": "refused", "why": str(error).partition("\n    at ")[0]}
    except Exception as error:
        return {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:500]}
    delegation = lowered.delegation()
    left = {"delegates": delegation.delegates}
    return {"outcome": "same" if right else "wrong", "why": "" if right else lines[0], **left}


def page(rows: Iterable[Record]) -> str:
    """Return the page that tells what came of all families."""
    by: dict[str, list[Record]] = defaultdict(list)
    for row in sorted(rows, key=lambda each: each["family"]):
        by[row["outcome"]].append(row)
    count = sum(map(len, by.values()))
    text = [
        "# Families of language models",
        "",
        f"Results of `nox -s families -- --write` with transformers {transformers.__version__}.",
        f"A small model with random weights of each of its {count} decoder families is exported",
        "for XNNPACK. The file runs in `lowerdeck.runner` and is compared with the model, which",
        "recomputes the whole text for each of 16 tokens.",
    ]
    for outcome, said in SAID.items():
        if not by[outcome]:
            continue
        text += ["", f"## {len(by[outcome])} {said}", ""]
        if outcome == "same":
            text.append(", ".join(f"`{row['family']}`" for row in by[outcome]) + ".")
            continue
        reasons: dict[str, list[str]] = defaultdict(list)
        for row in by[outcome]:
            reasons[_without_names(row)].append(f"`{row['family']}`")
        text += ["| families | reason |", "|---|---|"]
        text += [f"| {', '.join(names)} | {why} |" for why, names in sorted(reasons.items())]
    return "\n".join([*text, ""])


def _without_names(row: Record) -> str:
    """Return the reason in words that families share, fit for a table."""
    family = repr(row["family"])
    why = str(row["why"]).replace(f"a {family} model", "such a model").replace(family, "it")
    return " ".join(why.partition(": logits of ")[0].replace("|", "\\|").split())


def main() -> int:
    """Try the families that the command line names; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--write", action="store_true", help="write the page")
    args = resumable.arguments(parser, "families")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # What torch and transformers import and fill when they first export is then in each fork.
    _tried("llama")
    known = resumable.records(args, args.families, "family", lambda one: [of_family(one)])
    rows = [row for row in known if row["family"] in args.families]
    bad = [row for row in rows if row["outcome"] not in WELL]
    print(f"{len(rows)} families, {len(bad)} wrong or failed")
    print("\n".join(f"{row['family']}: {row['outcome']}: {row['why']}" for row in bad))
    if args.write:
        PAGE.write_text(page(known), encoding="utf-8")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
