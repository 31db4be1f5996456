"""Check that an index can show the description of every built file, with the renderer of PyPI."""

from __future__ import annotations

import email.message
import email.parser
import re
import sys
import tarfile
import zipfile
from pathlib import Path

from readme_renderer import markdown

from tools.workspace import PACKAGES, ROOT


def main() -> None:
    """Render what each file in ``dist/`` says of itself.

    Raises:
        SystemExit: With one line for each thing that is wrong.
    """
    files = sorted(p for p in (ROOT / "dist").iterdir() if p.name.endswith((".whl", ".tar.gz")))
    problems = [f"{file.name}: {problem}" for file in files for problem in problems_of(file)]
    # The umbrella is no package of ours, but an index shows it.
    if len(files) != 2 * (len(PACKAGES) + 1):
        problems.append(f"dist/ holds {len(files)} files, not two of each distribution")
    if problems:
        sys.exit("\n".join(problems))


def problems_of(file: Path) -> list[str]:
    """Return what an index would not show of one file as its author meant it."""
    metadata = email.parser.BytesParser().parsebytes(_metadata(file))
    if metadata["Description-Content-Type"] != "text/markdown":
        return [f"its description is {metadata['Description-Content-Type']}, not text/markdown"]
    page = markdown.render(_text(metadata))
    if not page:
        return ["its description does not render"]
    # The renderer drops a link to a place that it does not trust, and keeps relative ones.
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    return [f"{link} leads nowhere" for link in links if not link.startswith(("https://", "#"))]


def _text(metadata: email.message.Message) -> str:
    body = metadata.get_payload(decode=True)
    return body.decode() if isinstance(body, bytes) else ""


def _metadata(file: Path) -> bytes:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            return wheel.read(name)
    with tarfile.open(file) as sdist:
        (member,) = (m for m in sdist.getmembers() if re.fullmatch(r"[^/]+/PKG-INFO", m.name))
        found = sdist.extractfile(member)
        return found.read() if found else b""


if __name__ == "__main__":
    main()
