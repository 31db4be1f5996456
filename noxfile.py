"""Every check and chore of the repository; ``nox -l`` is the menu, a bare ``nox`` what CI runs."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import nox

nox.needs_version = ">=2026.8.10"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
# Few machines have every Python; a CI that sets ``CI`` would fail instead of skipping.
nox.options.error_on_missing_interpreters = False

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tools.workspace import (  # noqa: E402  (tools/ is beside this file, not on the path)
    PACKAGES,
    TEST_NEEDS,
    TORCH_FREE,
    extract,
    git,
    import_name,
    is_known,
    oldest_siblings,
    project,
    released_commit,
    restore_tag,
    siblings,
    umbrella,
)

ENVIRONMENTS = ROOT / ".nox"
CONSTRAINTS = ROOT / "constraints/torch-cpu.txt"
if TORCH := os.environ.get("TORCH"):
    # Another torch has environments and a constraint of its own; the usual ones stay as they are.
    ENVIRONMENTS /= f"torch-{TORCH}"
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    nox.options.envdir = str(ENVIRONMENTS)
    # Only torch is another one: the rest, such as OpenVINO, stays pinned.
    others = [line for line in CONSTRAINTS.read_text().splitlines() if "torch" not in line]
    CONSTRAINTS = ENVIRONMENTS / "constraints.txt"
    CONSTRAINTS.write_text("\n".join([f"torch=={TORCH}", *others, ""]))
# An unpinned torch resolves to gigabytes of CUDA: no session may forget the pin.
os.environ["PIP_CONSTRAINT"] = str(CONSTRAINTS)
# Whoever builds a release gets the same bytes.
os.environ["SOURCE_DATE_EPOCH"] = "1767225600"
# Two test processes that each start a thread per core only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

DIST = ROOT / "dist"
OUT = ROOT / "out"
DEV = ("-c", str(ROOT / "constraints/dev.txt"))
UMBRELLA_EXTRAS = ",".join(umbrella()["optional-dependencies"])
ZOO = "tests/zoo"
EDITABLE = [arg for package in PACKAGES for arg in ("-e", f"packages/{package}")]
EDITABLE += ["-e", ZOO]
TEST_TOOLS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis")
CHECK_TOOLS = (
    *("mypy", "nox", "griffe", "sybil", "import-linter", "ruff", "mkdocs-material"),
    *("mkdocstrings[python]", "distributed", "expecttest", "flatbuffers", "ruamel.yaml"),
    *("tabulate", "pandas"),
)
# A process per core for the long suites; more than four want more memory than most machines have.
# A test that hangs is named and fails: by a thread, as tests' forks count on SIGALRM's default.
TIMEOUT = ("--timeout", "900", "--timeout-method", "thread", "--durations", "15")
SIDE_BY_SIDE = (
    *("--numprocesses", "logical", "--maxprocesses", "4", "--dist", "worksteal", *TIMEOUT),
)
OFFICIAL_RUNTIME = os.environ.get("EXECUTORCH", "executorch==1.4.1")
NEWER_RUNTIME = "executorch==1.5.1"


def _wheels(*packages: str) -> list[str]:
    """Name wheels by path, so that no index can supply a package of the same name."""
    return [
        str(next(DIST.glob(f"lowerdeck_{import_name(package)}-*.whl"))) for package in packages
    ]


def _purelib(session: nox.Session) -> Path | None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    # An installation too, so that ``--install-only`` does it.
    found = session.run_install("python", "-c", code, silent=True)
    return Path(str(found).strip()) if found else None


@nox.session(default=False, allow_parallel=True)
def torch(session: nox.Session) -> None:
    """Install torch once; the other sessions borrow it."""
    session.install("torch", "numpy")
    (ENVIRONMENTS / "torch-purelib.txt").write_text(f"{_purelib(session)}\n")


def _borrow_torch(session: nox.Session) -> None:
    """Put the shared torch on this environment's path (``OWN_TORCH=1`` installs a private one)."""
    if os.environ.get("OWN_TORCH"):
        session.install("torch", "numpy")
    # ``-R`` installs nothing: it was lent before.
    elif (place := _purelib(session)) is not None:
        shutil.copy(ENVIRONMENTS / "torch-purelib.txt", place / "borrowed_torch.pth")


def _install_packages(session: nox.Session, *requirements: str) -> None:
    """Install all packages and the zoo editable, and what else a session needs."""
    session.install("hatchling", "editables", *requirements, *DEV)
    # An isolated build environment for each of them takes longer than some suites.
    session.install("--no-build-isolation", *EDITABLE, *DEV)


@nox.session(requires=["torch"], default=False, allow_parallel=True)
def dev(session: nox.Session) -> None:
    """Install all packages and what most checks need into one environment, which they share.

    Of executorch there is what its Python binding needs and exir imports (``EXECUTORCH=``
    ``executorch==1.5.1`` takes another; ``TORCH=2.15.0`` before it another torch).
    """
    _borrow_torch(session)
    _install_packages(session, *TEST_TOOLS, *CHECK_TOOLS)
    session.install(
        "--no-deps", OFFICIAL_RUNTIME, *(DEV if "EXECUTORCH" not in os.environ else ())
    )
    session.install("--no-deps", "torchao", *DEV)


# Decorates a session that runs in the environment of ``dev``.
shared = partial(nox.session, requires=["dev"], venv_backend="none", allow_parallel=True)


def _run(session: nox.Session, tool: str, *args: str, env: dict[str, str] | None = None) -> None:
    """Run a tool of the environment that ``dev`` made."""
    tools = ENVIRONMENTS / "dev/bin"
    path = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    session.run(str(tools / tool), *args, env=path | (env or {}), external=True)


def _pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Run today's share of tests, in a process per core unless other sessions run as well."""
    _run(session, "pytest", "-p", "lowerdeck_zoo.todays", *args, *_workers(session), env=env)


def _workers(session: nox.Session) -> tuple[str, ...]:
    return TIMEOUT if session.parallel else SIDE_BY_SIDE


def _chosen(session: nox.Session) -> tuple[list[str], list[str]]:
    """Split what stands after ``--`` into package names (all, if none) and other arguments."""
    chosen = [arg for arg in session.posargs if arg in PACKAGES]
    return chosen or list(PACKAGES), [arg for arg in session.posargs if arg not in PACKAGES]


def _test_installed(session: nox.Session, package: str, *options: str) -> None:
    """Run a package's tests from a copy, where nothing of the sources is in reach."""
    needed = TEST_NEEDS.get(package, ())
    declared = [entry for one in needed for entry in project(one)["dependencies"]]
    others = [entry for entry in declared if not entry.startswith(("torch", "lowerdeck"))]
    session.install("hatchling", *others, *DEV)
    # Not editable, and with the installed torch and siblings.
    folders = [f"./packages/{one}" for one in needed]
    session.install("--no-deps", "--no-build-isolation", ZOO, *folders)
    copy = Path(session.create_tmp()).resolve() / "tests"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT / "packages" / package / "tests", copy)
    with session.chdir(copy.parent):
        session.run(
            *("pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(copy)),
            *(str(copy), *_workers(session), *options),
            env={"LOWERDECK_NIGHTLY": "1"} if "whole" in session.posargs else None,
        )


def _build_released(session: nox.Session, package: str, version: str, folder: Path) -> Path:
    """Build the wheel of a release from the commit that the record names."""
    restore_tag(package, version)
    commit = str(released_commit(package, version))
    source = extract(commit, f"packages/{package}", folder / f"{package}-{version}")
    session.run(
        *("python", "-m", "build", "-w", "--no-isolation", "-o", str(folder), str(source)),
        silent=True,
    )
    return next(folder.glob(f"lowerdeck_{import_name(package)}-{version}-*.whl"))


# Packages that the example of a README uses beside those that its package declares.
README_NEEDS = {
    "runner": ("decompose", "emitter"),
    "exir-compat": ("graph-fuser", "runner", "xnnpack"),
}
# What modules of an extra import: without it, pyright does not know what their classes are.
TYPES_NEED = {"exir-compat": ("transformers",)}
OTHER_TOOLS = "docs/how-to/decompose-for-other-tools.md"
WITH_TORCHAO = (
    "docs/how-to/move-from-exir.md",
    "docs/how-to/quantise-for-xnnpack.md",
    "docs/how-to/unflatten-and-swap.md",
)
CONV_RELU_TAN = "lowerdeck.demo_backends:BackendWithDelegateMappingDemo.get_test_model_and_inputs"


def _do_main_job(session: nox.Session, factories: dict[str, str], folder: Path) -> None:
    """Lower models, compare what runs with eager, and show what the files hold."""
    for name, factory in factories.items():
        file = str(folder / f"{name}.pte")
        session.run(
            *("lowerdeck", "lower", factory, "--backend", "BackendWithDelegateMappingDemo"),
            *("--output", file, "--check"),
        )
        session.run("lowerdeck", "inspect", file)


@nox.session(requires=["torch"], default=False)
def demo(session: nox.Session) -> None:
    """Do the main job: real models in, .pte files out, executed and compared with eager.

    The last one runs in the official runtime, float and int8; ``-- --peer`` sets ExecuTorch's own
    files of it beside ours, which wants all that executorch depends on.
    """
    _borrow_torch(session)
    _install_packages(session)
    OUT.mkdir(exist_ok=True)
    factories = {"resnet18": "examples.resnet18:example", "conv_relu_tan": CONV_RELU_TAN}
    _do_main_job(session, factories, OUT)
    alone = () if "--peer" in session.posargs else ("--no-deps",)
    session.install(*alone, OFFICIAL_RUNTIME, *(() if alone else DEV))
    session.install("--no-deps", "torchao", *DEV)
    folder = str(OUT / "beside-executorch")
    session.run("python", "-m", "examples.beside_executorch", folder, *session.posargs)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    """Check formatting and style."""
    session.install("ruff", *DEV)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    # Entries of Args that are no parameters; the rule is in preview.
    session.run("ruff", "check", "--preview", "--select", "DOC102", ".")


@shared
def layers(session: nox.Session) -> None:
    """Fail when an import goes up the layers, closes a cycle or reaches behind a front door."""
    _run(session, "lint-imports", "--no-cache")


@shared
def interop(session: nox.Session) -> None:
    """Run what we write in the official runtime."""
    # What is named after ``--`` is looked at in one process, where a debugger works.
    if session.posargs:
        _run(session, "pytest", "tests/interop", *session.posargs)
        return
    _pytest(session, "tests/interop", "tests/soak")
    # A tenth in the newest runtime, which shadows the other one by its place on the path.
    newer = str(ENVIRONMENTS / NEWER_RUNTIME)
    pip = ("install", "--quiet", "--no-deps", "--upgrade", "--target", newer, NEWER_RUNTIME)
    _run(session, "pip", *pip)
    files = ("test_zoo.py", "test_emitter_operators.py", "test_xnnpack_official.py")
    env = {"PYTHONPATH": newer, "LOWERDECK_EVERY": "10"}
    paths = [f"tests/interop/{name}" for name in files]
    _run(session, "pytest", *paths, *_workers(session), env=env)


@shared
def tests(session: nox.Session) -> None:
    """Run the tests of the repository and of every package, or of those named after ``--``.

    Packages without torch are left out unless they are named: ``alone`` runs all their tests.
    """
    chosen, options = _chosen(session)
    if any(arg in PACKAGES for arg in session.posargs):
        _run(session, "pytest", *(f"packages/{package}/tests" for package in chosen), *options)
        return
    _run(session, "pytest", "tests/repository", *_workers(session), *options)
    failed = []
    # Each in a process of its own: some change settings of torch.
    for package in PACKAGES:
        if package not in TORCH_FREE:
            try:
                _pytest(session, f"packages/{package}/tests", *options)
            except nox.command.CommandFailed:
                failed.append(package)
    if failed:
        session.error(f"these fail: {', '.join(failed)}")


@shared
def types(session: nox.Session) -> None:
    """Type-check every package and its tests, strictly."""
    chosen, _ = _chosen(session)
    for package in chosen:
        _run(session, "mypy", f"packages/{package}/src", f"packages/{package}/tests")
    _run(session, "mypy", f"{ZOO}/src")
    _run(session, "mypy", "tools", "noxfile.py")


def _test_with_own_torch(session: nox.Session) -> None:
    """Run all packages' tests, or those named after ``--``, on another Python (5 GB of torch)."""
    # The torch that the other sessions borrow is built for their Python only.
    _install_packages(session, "torch", "numpy", *TEST_TOOLS)
    session.install("--no-deps", OFFICIAL_RUNTIME, *DEV)
    chosen, options = _chosen(session)
    for package in chosen:
        session.run("pytest", f"packages/{package}/tests", *options)


for version in ("3.12", "3.13", "3.14"):
    nox.session(name=f"tests-{version}", python=version, default=False)(_test_with_own_torch)


@shared
def docs(session: nox.Session) -> None:
    """Build the pages with warnings as errors and run every code block in them."""
    _run(session, "mkdocs", "build", "--strict", "--quiet")
    _run(
        *(session, "pytest", "-p", "tools.run_code_blocks", f"--ignore={OTHER_TOOLS}"),
        *(f"--ignore={page}" for page in WITH_TORCHAO),
        *("README.md", "umbrella/README.md", "docs"),
        env={"PYTHONPATH": str(ROOT)},
    )


@nox.session(name="docs-other-tools", requires=["torch"], default=False)
def docs_other_tools(session: nox.Session) -> None:
    """Run the pages on other people's tools, which take 200 MB."""
    _borrow_torch(session)
    _install_packages(session, "sybil", "pytest", "onnx", "onnxscript", "openvino")
    session.run(
        *("pytest", "-p", "tools.run_code_blocks", OTHER_TOOLS), env={"PYTHONPATH": str(ROOT)}
    )
    session.install("--no-deps", "torchao", *DEV)
    session.run(
        # torchao raises dozens of warnings against itself.
        *("pytest", "-p", "tools.run_code_blocks", "-W", "ignore", *WITH_TORCHAO),
        env={"PYTHONPATH": str(ROOT)},
    )


@nox.session(default=False, allow_parallel=True)
def build(session: nox.Session) -> None:
    """Build sdists, and wheels from them, into ``dist/``; their descriptions must render."""
    # Here once for all packages: node, which pyright needs, takes 200 MB.
    session.install("build", "hatchling", "pyright[nodejs]", "readme-renderer[md]", "twine", *DEV)
    shutil.rmtree(DIST, ignore_errors=True)
    for folder in ("umbrella", *(f"packages/{package}" for package in PACKAGES)):
        session.run(
            *("python", "-m", "build", "--no-isolation", "-o", str(DIST), folder), silent=True
        )
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))


@nox.session(requires=["build", "torch"], reuse_venv=False, allow_parallel=True)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Import one wheel and run its README with only what it declares; ``-- whole``: its tests too.

    A package without torch has its whole suite run here always.
    """
    if package not in TORCH_FREE:
        _borrow_torch(session)
    whole = package in TORCH_FREE or "whole" in session.posargs
    tools = TEST_TOOLS if whole else ("pytest",)
    session.install(*tools, "sybil", *_wheels(package, *siblings(package)), *DEV)
    session.run("python", "-m", "pip", "check")
    check = str(ROOT / "tools/check_installed.py")
    with session.chdir(Path(session.create_tmp())):
        session.run("python", check, package, *sorted(siblings(package)))
        if "whole" in session.posargs:
            if package in TYPES_NEED:
                session.install(*TYPES_NEED[package], *DEV)
            session.run(
                *(str(ENVIRONMENTS / "build/bin/pyright"), "--ignoreexternal", "--verifytypes"),
                f"lowerdeck.{import_name(package)}",
                external=True,
            )
    if whole:
        _test_installed(session, package, *(arg for arg in session.posargs if arg != "whole"))
    if package in README_NEEDS:
        session.install("--no-deps", *_wheels(*README_NEEDS[package]))
    session.run(
        *("pytest", "-p", "tools.run_code_blocks", f"packages/{package}/README.md"),
        env={"PYTHONPATH": str(ROOT)},
    )


@nox.session(requires=["torch"], reuse_venv=False, default=False)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def oldest(session: nox.Session, package: str) -> None:
    """Test one package with the oldest siblings that it admits, built from their commits."""
    # All of them, also those that only a sibling needs, so that pip looks for none elsewhere.
    wanted = oldest_siblings(package)
    if not wanted:
        session.skip("it declares no sibling")
    for sibling, version in wanted.items():
        commit = released_commit(sibling, version)
        if commit is None:
            session.skip(f"{sibling} {version} is not in releases.toml: it has not been released")
        if not is_known(commit):
            session.skip(f"{sibling} {version} is {commit}, which this clone lacks")
    # One that was changed after its release has the same version until the next one.
    if not any(
        git("diff", "--name-only", str(released_commit(*one)), "--", f"packages/{one[0]}/src")
        for one in wanted.items()
    ):
        session.skip("its oldest siblings are the newest, which `alone -- whole` tests")
    if package not in TORCH_FREE:
        _borrow_torch(session)
    session.install("build", "hatchling", *TEST_TOOLS, *DEV)
    here = Path(session.create_tmp()).resolve()
    shutil.rmtree(here / "old", ignore_errors=True)
    old = [_build_released(session, *one, here / "old") for one in wanted.items()]
    session.install(*map(str, old))
    session.install(f"./packages/{package}")
    session.run("python", "-m", "pip", "check")
    _test_installed(session, package)


@nox.session(requires=["build", "torch"], default=False)
def release(session: nox.Session) -> None:
    """Say what stands between ``-- PACKAGE`` and its tag; test it alone and with the oldest."""
    session.install("griffe", "build", "hatchling", *DEV)
    session.run("python", "-m", "tools.release", *session.posargs)
    for package in session.posargs:
        session.notify(f"alone({package})", posargs=("whole",))
        session.notify(f"oldest({package})", posargs=())


@shared(default=False)
def soak(session: nox.Session) -> None:
    """Run random raw programs every way against eager: ``-- FIRST PAST [--shard 1/4]``.

    What came of each seed is kept in ``out/soak.jsonl``; a seed that is there is not run again.
    """
    _run(session, "python", "tests/soak/run.py", *(session.posargs or ("0", "1000")))


@shared(default=False)
def mutants(session: nox.Session) -> None:
    """Damage files, and run those that verify accepts in the official runtime (hours, resumable).

    ``-- --count 10000 --shard 0/4 FOLDER...``: folders of further .pte files. Figures are kept in
    ``out/mutants``; a shard goes on where it stopped.
    """
    state = ("--state", str(OUT / "mutants"))
    _run(session, "python", "tests/interop/mutants.py", *state, *session.posargs)


@nox.session(name="code-mutants", requires=["torch"], default=False)
def code_mutants(session: nox.Session) -> None:
    """Change the code a little, and list what no test notices (hours, resumable).

    ``-- [--count 300] [--seed 48] [--shard 0/2] [--root FOLDER]``: which tests reach a mutant is
    measured first, a test file at a time. All is kept in ``out/code-mutants``.
    """
    _borrow_torch(session)
    _install_packages(session, *TEST_TOOLS, "cosmic-ray", "coverage", *CHECK_TOOLS)
    session.install("--no-deps", OFFICIAL_RUNTIME)
    session.install("--no-deps", "torchao", *DEV)
    session.run("python", "-m", "tools.code_mutants.run", *session.posargs)


@nox.session(requires=["torch"], default=False)
def nightly(session: nox.Session) -> None:
    """Run the whole of every suite: all seeds, files of gigabytes, all programs of the zoo."""
    _borrow_torch(session)
    _install_packages(session, *TEST_TOOLS, *CHECK_TOOLS, "transformers")
    session.install("--no-deps", OFFICIAL_RUNTIME)
    session.install("--no-deps", "torchao", *DEV)
    chosen, options = _chosen(session)
    folders = [f"packages/{package}/tests" for package in chosen]
    if not any(arg in PACKAGES for arg in session.posargs):
        folders += ["tests/interop", "tests/soak"]
    session.run(
        *("pytest", "-m", "heavy or not heavy", *folders, *SIDE_BY_SIDE, *options),
        env={"LOWERDECK_NIGHTLY": "1"},
    )


@shared(default=False)
def conformance(session: nox.Session) -> None:
    """Emit every operator sample of torch's own test data and run it in the official runtime."""
    _run(
        *(session, "pytest", "-m", "heavy or not heavy", "tests/conformance", "tests/retraced"),
        *session.posargs,
    )


@nox.session(requires=["torch"], default=False)
def retraced(session: nox.Session) -> None:
    """Take programs apart as torch does, by the thousand: ``-- raw writes zoo models operators``.

    What came of each is kept in ``out/retraced.jsonl`` and not run again; ``--shard 1/4`` takes a
    part. torchvision's compiled part may be for another build of torch: nothing calls it.
    """
    _borrow_torch(session)
    _install_packages(session, *TEST_TOOLS, "expecttest", "transformers")
    session.install("--no-deps", "torchvision", "timm", "pillow")
    session.run("python", "tests/retraced/run.py", *(session.posargs or ("zoo", "models", "raw")))


@shared(default=False)
def changes(session: nox.Session) -> None:
    """Replace and hook modules of random hierarchies: ``-- [FIRST PAST] [--shard 1/4]``.

    Without seeds it takes 2,000 fresh ones each day. What came of each is kept in
    ``out/changes.jsonl``; a seed that is there is not run again.
    """
    _run(session, "python", "tests/changes/run.py", *session.posargs)


@nox.session(requires=["torch"], default=False)
def families(session: nox.Session) -> None:
    """Export each family of language models of transformers: ``-- [FAMILY...] [--write]``.

    What came of each is kept in ``out/families.jsonl`` and not tried again; ``--write`` writes the
    page about them.
    """
    _borrow_torch(session)
    _install_packages(session)
    session.run(
        *("python", "tests/families/run.py", *session.posargs), env={"HF_HUB_OFFLINE": "1"}
    )


@nox.session(requires=["torch"], default=False)
def clients(session: nox.Session) -> None:
    """Lower classes of transformers as its own exporter exports them: ``-- [CLASS...] [--write]``.

    ``--modes static dynamic`` are both by default. What came of each is kept in
    ``out/clients.jsonl`` and not tried again; ``--write`` writes the page about them. With
    ``beside`` first, some are also exported by transformers' own exporter, with exir.
    """
    _borrow_torch(session)
    _install_packages(session)
    others = ("torchvision", "timm", "pillow", "torchao")
    session.install("--no-deps", OFFICIAL_RUNTIME, *others, *DEV)
    script, arguments = "run.py", session.posargs
    if arguments[:1] == ["beside"]:
        script, arguments = "beside.py", arguments[1:]
    session.run("python", f"tests/clients/{script}", *arguments, env={"HF_HUB_OFFLINE": "1"})


@nox.session(default=False)
def peers(session: nox.Session) -> None:
    """Compare with all of ExecuTorch, torch and transformers, in an environment of its own."""
    session.install("torch", "numpy", OFFICIAL_RUNTIME, "transformers", "tabulate")
    # Arm's pipelines; their own pins of numpy are older than torch's.
    session.install("--no-deps", "tosa-tools", "ethos-u-vela", "ml_dtypes", "lxml")
    _install_packages(session, *TEST_TOOLS)
    session.run("pytest", "-m", "heavy or not heavy", "tests/peers", *session.posargs)


@nox.session(name="torch-matrix", venv_backend="none", default=False)
def torch_matrix(session: nox.Session) -> None:
    """Test on another torch, gigabytes of it: ``-- VERSION [PACKAGE... interop]``.

    Each version keeps its environments (``.nox/torch-VERSION``); any other session runs there
    with ``TORCH=VERSION`` before it. From the default index a version takes 5 GB of disk, of
    which all but 1 GB is CUDA that is never called; where pip is told of an index of CPU builds
    (``PIP_EXTRA_INDEX_URL``), it prefers those.
    """
    known = (*PACKAGES, "interop")
    version, *arguments = session.posargs or ["none"]
    if not version[0].isdigit():
        session.error("name a version of torch first: nox -s torch-matrix -- 2.15.0")
    options = [argument for argument in arguments if argument not in known]
    failed = []
    installed: set[str] = set()
    for suite in [argument for argument in arguments if argument in known] or known:
        chosen = "interop" if suite == "interop" else "tests"
        # Installing the same once more takes longer than some of the suites.
        again = ["-R"] if chosen in installed else []
        installed.add(chosen)
        try:
            session.run(
                *(sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), *again),
                *("-s", chosen, "--", *([suite] if suite in PACKAGES else []), *options),
                env={"TORCH": version},
                external=True,
            )
        except nox.command.CommandFailed:
            failed.append(suite)
    if failed:
        session.error(f"on torch {version} these fail: {', '.join(failed)}")


@nox.session(requires=["torch"], default=False)
def browser(session: nox.Session) -> None:
    """Open our HTML reports in headless Chromium (skips with the reason where there is none)."""
    _borrow_torch(session)
    _install_packages(session, *TEST_TOOLS, "selenium")
    session.run("pytest", "tests/browser", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure every package beside its peers and write ``benchmarks/RESULTS.md``."""
    session.install("torch", "numpy", OFFICIAL_RUNTIME, "transformers", "tabulate", "psutil")
    _install_packages(session)
    session.install("--no-deps", "torchao", "torchvision", "timm", "pillow", *DEV)
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session(default=False)
def arm(session: nox.Session) -> None:
    """Run XNNPACK's files of every mode on ARM: ``ARM_PYTHON`` is a Python there, or emulated."""
    _install_packages(session, "torch", "numpy", OFFICIAL_RUNTIME, "transformers")
    session.install("--no-deps", "torchao", *DEV)
    session.run("python", "-m", "tests.arm.run", *session.posargs)
