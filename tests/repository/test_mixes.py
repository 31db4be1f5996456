"""Which versions of the packages may stand together, by their pins."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tools import mixes, workspace

OLD_AND_NEW = {
    "low": {"0.1.0": {}, "0.1.1": {}},
    "high": {"0.1.0": {"low": ("0.1.0", "0.2")}, "0.2.0": {"low": ("0.1.1", "0.2")}},
    "top": {"0.1.0": {"high": ("0.2.0", "0.3")}},
}


def test_each_mix_is_allowed_and_as_large_as_can_be():
    assert mixes.largest_mixes(OLD_AND_NEW) == [
        {"low": "0.1.0", "high": "0.1.0"},
        {"low": "0.1.1", "high": "0.1.0"},
        {"low": "0.1.1", "high": "0.2.0", "top": "0.1.0"},
    ]


def test_a_package_that_nothing_fits_is_in_no_mix():
    known = {"low": {"0.2.0": {}}, "high": {"0.1.0": {"low": ("0.1.0", "0.2")}}}
    assert mixes.largest_mixes(known) == [{"low": "0.2.0"}]


def test_any_three_versions_that_can_stand_together_do_in_a_chosen_mix():
    free = {name: {"0.1.0": {}, "0.2.0": {}} for name in "abcdefgh"}
    every = mixes.largest_mixes(free)
    chosen = mixes.covering_mixes(every)
    assert len(every) == 2**8
    assert len(chosen) < 20
    for three in combinations(free, 3):
        for versions in product(("0.1.0", "0.2.0"), repeat=3):
            wanted = dict(zip(three, versions, strict=True)).items()
            assert any(wanted <= mix.items() for mix in chosen)


def test_fewer_packages_than_that_are_tried_in_every_mix():
    every = mixes.largest_mixes(OLD_AND_NEW)
    assert mixes.covering_mixes(every) == [every[2], every[0], every[1]]


@pytest.mark.parametrize(
    ("present", "recorded", "kept"),
    [
        ("0.1.0", [], []),
        ("0.1.0", ["0.1.0"], []),
        ("0.1.2", ["0.1.0", "0.1.1"], ["0.1.1"]),
        # The release before, and the last one of each minor version before that.
        ("0.2.2", ["0.1.0", "0.1.3", "0.2.0", "0.2.1"], ["0.2.1", "0.1.3"]),
        ("0.2.2", ["0.1.0", "0.2.0", "0.2.1", "0.2.2"], ["0.2.1", "0.1.0"]),
        ("0.3.0", ["0.1.9", "0.1.10", "0.2.0"], ["0.2.0", "0.1.10"]),
        ("1.0.0", ["0.8.1", "0.9.0"], ["0.9.0", "0.8.1"]),
    ],
)
def test_the_release_before_and_the_last_of_each_earlier_minor_are_kept(present, recorded, kept):
    assert mixes.kept_releases(present, recorded) == kept


def test_every_minor_version_that_the_pins_allow_beside_others_is_in_a_mix():
    """The old and the new minor versions together, in each mix that the pins allow."""
    known = mixes.known_versions()
    allowed = {one for mix in mixes.largest_mixes(known) for one in mix.items()}
    for package, recorded in workspace.releases().items():
        minors = {version.rpartition(".")[0] for version in recorded}
        # None is left out today; one whose pins nothing fits any more may be, with a reason here.
        assert {v.rpartition(".")[0] for p, v in allowed if p == package} == minors, package


def test_one_mix_is_these_sources_alone():
    known = mixes.known_versions()
    present = {package: next(iter(versions)) for package, versions in known.items()}
    assert list(present) == list(workspace.PACKAGES)
    assert present in mixes.largest_mixes(known)


def test_the_oldest_siblings_are_those_of_siblings_too(monkeypatch):
    declared = {
        "top": {"dependencies": ["lowerdeck-middle>=0.1.0,<0.2", "lowerdeck-low>=0.1.0,<0.2"]},
        "middle": {"dependencies": []},
        "low": {"dependencies": []},
    }
    released = {
        "middle": {"dependencies": ["torch>=2.13", "lowerdeck-low>=0.1.2,<0.2"]},
        "low": {"dependencies": []},
    }
    monkeypatch.setattr(mixes, "project", lambda package: {"version": "9", **declared[package]})
    monkeypatch.setattr(mixes, "project_at", lambda commit, package: released[package])
    monkeypatch.setattr(mixes, "released_commit", lambda package, version: "a commit")
    monkeypatch.setattr(mixes, "is_known", lambda commit: True)
    assert mixes.oldest_siblings("top") == {"middle": "0.1.0", "low": "0.1.2"}


@pytest.mark.parametrize("package", workspace.PACKAGES)
def test_every_sibling_that_pip_would_look_for_is_built_for_oldest(package):
    assert set(mixes.oldest_siblings(package)) == workspace.siblings(package)
