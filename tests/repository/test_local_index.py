"""The dry run of a release: built files as an index that pip installs from."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.local_index import make_index


def _wheel(folder: Path, project: str, version: str, needs: str = "") -> None:
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n{needs}"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", kind)
        wheel.writestr(f"{info}/RECORD", "")


def test_pip_takes_the_newest_with_what_it_needs_from_it(tmp_path):
    dist, index, found = (tmp_path / name for name in ("dist", "index", "found"))
    dist.mkdir()
    _wheel(dist, "some-base", "0.1.0")
    _wheel(dist, "some-base", "0.2.0")
    _wheel(dist, "some-top", "1.0.0", "Requires-Dist: some-base>=0.1,<0.2\n")
    assert make_index(dist, index) == ["some-base", "some-top"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir"),
            *("--index-url", index.as_uri(), "--dest", str(found), "some-top"),
        ],
        check=True,
        env={"PIP_CONFIG_FILE": "/dev/null", "PATH": ""},
    )
    assert sorted(file.name for file in found.iterdir()) == [
        "some_base-0.1.0-py3-none-any.whl",
        "some_top-1.0.0-py3-none-any.whl",
    ]


def test_a_folder_without_built_files_is_no_index(tmp_path):
    with pytest.raises(ValueError, match="holds no wheel and no sdist: nox -s build"):
        make_index(tmp_path, tmp_path / "index")
