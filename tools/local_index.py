"""Built files as an index that pip reads: ``python -m tools.local_index DIST FOLDER``."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
import sys
from pathlib import Path


def make_index(dist: Path, folder: Path) -> list[str]:
    """Write a simple index (PEP 503) and return the names of the projects in it.

    Args:
        dist: Where wheels and sdists lie.
        folder: Where the index goes; it must not be there yet.

    Raises:
        FileExistsError: The folder is there.
        ValueError: There is nothing to put into it.
    """
    files: dict[str, list[Path]] = {}
    for file in sorted(dist.iterdir()):
        if match := re.fullmatch(r"(.+?)-\d[^-]*(?:-.+\.whl|\.tar\.gz)", file.name):
            files.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), []).append(file)
    if not files:
        raise ValueError(f"{dist} holds no wheel and no sdist: nox -s build")
    folder.mkdir(parents=True)
    for project, built in files.items():
        (folder / project).mkdir()
        links = []
        for file in built:
            shutil.copy(file, folder / project)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            name = html.escape(file.name)
            links.append(f'<a href="{name}#sha256={digest}">{name}</a><br>')
        (folder / project / "index.html").write_text("\n".join(["<!doctype html>", *links]))
    names = "\n".join(f'<a href="{one}/">{one}</a><br>' for one in files)
    (folder / "index.html").write_text(f"<!doctype html>\n{names}")
    return list(files)


if __name__ == "__main__":
    print("\n".join(make_index(Path(sys.argv[1]), Path(sys.argv[2]))))
