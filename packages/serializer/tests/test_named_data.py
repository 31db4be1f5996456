"""The store in which backends put what they share."""

from __future__ import annotations

from typing import Any

import pytest

from lowerdeck.serializer import (
    DataEntry,
    NamedDataConflictError,
    NamedDataStore,
    NamedDataStoreOutput,
    ProgramError,
    ScalarType,
    TensorLayout,
)

ZEROS = bytes(1000)


def stored(*entries: tuple[Any, ...]) -> NamedDataStoreOutput:
    store = NamedDataStore()
    for entry in entries:
        store.add_named_data(*entry)
    return store.get_named_data_store_output()


@pytest.mark.parametrize(
    ("entries", "buffers", "expected"),
    [
        (
            [("a", b"data", 16), ("b", memoryview(b"data"))],
            [b"data"],
            {"a": DataEntry(0, 16), "b": DataEntry(0, 1)},
        ),
        # Both alignments hold.
        ([("a", b"data", 4), ("a", b"data", 6)], [b"data"], {"a": DataEntry(0, 12)}),
        # They differ only between their ends.
        (
            [("a", ZEROS), ("b", ZEROS[:200] + b"1" + ZEROS[201:])],
            [ZEROS, ZEROS[:200] + b"1" + ZEROS[201:]],
            {"a": DataEntry(0, 1), "b": DataEntry(1, 1)},
        ),
    ],
)
def test_equal_blobs_share_a_buffer(
    entries: list[tuple[Any, ...]], buffers: list[bytes], expected: dict[str, DataEntry]
) -> None:
    output = stored(*entries)
    assert output.buffers == buffers
    assert output.pte_data == expected


def test_tags_go_to_their_own_files() -> None:
    layout = TensorLayout(ScalarType.INT, [1], [0])
    output = stored(("a", b"data", 1, "one", layout), ("b", b"more", 1, "two"))
    assert output.pte_data == {}
    assert output.external_data == {
        "one": {"a": DataEntry(0, 1, layout)},
        "two": {"b": DataEntry(1, 1)},
    }


def test_merging_brings_everything_over_or_changes_nothing() -> None:
    store = NamedDataStore()
    before = store.get_named_data_store_output()
    store.add_named_data("a", b"data", 16)
    store.merge_named_data_store(stored(("a", b"data", 3), ("b", b"more", 8, "tag")))
    assert before.pte_data == {}
    for conflict in (stored(("c", b"new"), ("a", b"other")), stored(("a", b"other"))):
        with pytest.raises(NamedDataConflictError, match="'a'") as caught:
            store.merge_named_data_store(conflict)
        assert caught.value.key == "a"
    with pytest.raises(NamedDataConflictError, match="'a'"):
        store.add_named_data("a", b"other")
    output = store.get_named_data_store_output()
    assert output.pte_data == {"a": DataEntry(0, 48)}
    assert output.external_data["tag"]["b"].alignment == 8


@pytest.mark.parametrize(
    ("data", "alignment", "message"),
    [
        (b"", 0, "expected at least 1"),
        (b"", -1, "expected at least 1"),
        (object(), 1, r"tensor\.numpy\(\)"),
    ],
)
def test_an_impossible_entry_is_refused(data: Any, alignment: int, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        NamedDataStore().add_named_data("a", data, alignment)
