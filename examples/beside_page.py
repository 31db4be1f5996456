"""The page that ``beside_executorch`` writes: numbers as bars, and the reports of our files."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>ResNet-18 beside ExecuTorch</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 78rem; margin: auto; padding: 1em }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .3rem .8rem; border-bottom: 1px solid #8886 }}
.bar {{ width: 24%; background: linear-gradient(90deg, #4a90d955 var(--part), transparent 0) }}
iframe {{ width: 100%; height: 50rem; border: 1px solid #8886 }}
</style><h1>ResNet-18 for XNNPACK</h1>
<p>One <code>ExportedProgram</code> for a 224&times;224 image, weights drawn at random. Lowering
is processor time, from the program to bytes, cold. A call is the median of 20 in
<strong>{runtime}</strong>, on one thread, the files in turn. The error is the largest difference
from eager float, over the largest result.</p>
<table><thead><tr><th>form<th>file made by<th>lowering<th>a call, in the official runtime
<th>file<th>error<tbody>
{rows}</table>
<p>Below is what our files hold and which kernel ran where. These times are of
<strong>lowerdeck.runner</strong>, which emulates a delegate's operators one by one to tell where
time and memory go: they are no measure of a device.</p>
{reports}</html>
"""

_TO_THE_KERNELS = (
    "this.contentWindow.scrollTo(0, this.contentDocument.getElementById('instructions').offsetTop)"
)


def page(
    rows: Iterable[tuple[str, str, Mapping[str, Any]]], reports: Mapping[str, str], runtime: str
) -> str:
    """Return the page, which needs no other file.

    Args:
        rows: Form, maker, and what was measured of their file: seconds that it was "lowered" in,
            seconds of a "run", its "size" in bytes, its "error".
        reports: Pages to show below, under their titles.
        runtime: What the calls were timed in.
    """
    told = list(rows)
    longest = {what: max(row[what] for *_, row in told) for what in ("lowered", "run")}

    def bar(row: Mapping[str, Any], what: str) -> str:
        part = 100 * row[what] / longest[what]
        return f'<td class="bar" style="--part:{part:.1f}%">{1000 * row[what]:,.1f} ms'

    return _PAGE.format(
        runtime=html.escape(runtime),
        rows="".join(
            f"<tr><th>{form}<th>{maker}{bar(row, 'lowered')}{bar(row, 'run')}"
            f"<td>{row['size'] / 1e6:.2f} MB<td>{row['error']:.1e}\n"
            for form, maker, row in told
        ),
        reports="".join(
            f"<h2>{html.escape(title)}</h2>\n"
            f'<iframe title="{html.escape(title)}" srcdoc="{html.escape(text)}"'
            f' onload="{_TO_THE_KERNELS}"></iframe>\n'
            for title, text in reports.items()
        ),
    )
