"""The last demo-backends that owned XNNPACK, as it was released, beside today's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib

import pytest

from tools.workspace import extract, is_known, released_commit

VERSION = "0.1.0"
SCRIPT = """
import json, warnings
warnings.simplefilter("ignore")
import torch
{first}
from importlib.metadata import version
from lowerdeck.emitter import emit
from lowerdeck.lowered_module import find_backend, find_partitioner, to_backend
from lowerdeck.runner import load
exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
answer = {{"version": version("lowerdeck-demo-backends")}}
with warnings.catch_warnings(record=True) as told:
    warnings.filterwarnings("always", message=".*both offer", category=UserWarning)
    for name in ("XnnpackBackend", "ExecutorBackend"):
        partitioner = find_partitioner(name)
        method = load(emit(to_backend(exported, partitioner)).to_bytes()).method("forward")
        torch.testing.assert_close(method(torch.ones(1, 2)), exported.module()(torch.ones(1, 2)))
        answer[name] = [type(partitioner).__module__, find_backend(name).__module__]
answer["told"] = [str(one.message) for one in told]
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return a folder in which the released distribution is installed."""
    commit = released_commit("demo-backends", VERSION)
    if not is_known(commit):
        pytest.skip(f"this clone lacks {commit}, of which demo-backends {VERSION} was built")
    folder = tmp_path_factory.mktemp("released")
    source = extract(commit, "packages/demo-backends", folder)
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = source / f"src/lowerdeck_demo_backends-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info.parent


@pytest.mark.parametrize("first", ["", "import lowerdeck.demo_backends"])
def test_the_new_package_wins_with_one_warning_and_the_old_one_keeps_its_own(released, first):
    path = os.pathsep.join(filter(None, [str(released), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"] == VERSION
    assert all(name.startswith("lowerdeck.xnnpack.") for name in answer["XnnpackBackend"])
    assert all(name.startswith("lowerdeck.demo_backends.") for name in answer["ExecutorBackend"])
    (message,) = answer["told"]
    assert "import it from lowerdeck.xnnpack, and upgrade or uninstall" in message
