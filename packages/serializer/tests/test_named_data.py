"""The store in which backends put what they share."""

from __future__ import annotations

import pytest

from lowerdeck.serializer import (
    DataEntry,
    NamedDataConflictError,
    NamedDataStore,
    ProgramError,
    ScalarType,
    TensorLayout,
)


def test_equal_blobs_share_a_buffer_and_keep_their_keys() -> None:
    store = NamedDataStore()
    store.add_named_data("a", b"data", alignment=16)
    store.add_named_data("b", memoryview(b"data"))
    output = store.get_named_data_store_output()
    assert output.buffers == [b"data"]
    assert output.pte_data == {"a": DataEntry(0, 16), "b": DataEntry(0, 1)}


def test_the_same_key_with_the_same_data_satisfies_both_alignments() -> None:
    store = NamedDataStore()
    store.add_named_data("a", b"data", alignment=4)
    store.add_named_data("a", b"data", alignment=6)
    assert store.get_named_data_store_output().pte_data["a"].alignment == 12


def test_a_conflict_names_the_key_and_changes_nothing() -> None:
    store = NamedDataStore()
    store.add_named_data("layer.weight", b"data")
    with pytest.raises(NamedDataConflictError, match=r"'layer\.weight'") as caught:
        store.add_named_data("layer.weight", b"other data")
    assert caught.value.key == "layer.weight"
    assert store.get_named_data_store_output().buffers == [b"data"]


def test_blobs_that_differ_only_between_their_ends_are_told_apart() -> None:
    store = NamedDataStore()
    zeros = bytes(1000)
    store.add_named_data("a", zeros)
    store.add_named_data("b", zeros[:200] + b"1" + zeros[201:])
    assert len(store.get_named_data_store_output().buffers) == 2


def test_tags_go_to_their_own_files() -> None:
    store = NamedDataStore()
    layout = TensorLayout(ScalarType.INT, [1], [0])
    store.add_named_data("a", b"data", external_tag="one", tensor_layout=layout)
    store.add_named_data("b", b"more", external_tag="two")
    output = store.get_named_data_store_output()
    assert output.pte_data == {}
    assert output.external_data == {
        "one": {"a": DataEntry(0, 1, layout)},
        "two": {"b": DataEntry(1, 1)},
    }


def test_output_is_a_snapshot() -> None:
    store = NamedDataStore()
    output = store.get_named_data_store_output()
    store.add_named_data("a", b"data")
    assert output.pte_data == {}


def test_merge_brings_everything_over() -> None:
    one, two = NamedDataStore(), NamedDataStore()
    one.add_named_data("a", b"data", 16)
    two.add_named_data("a", b"data", 3)
    two.add_named_data("b", b"more", 8, "tag")
    one.merge_named_data_store(two.get_named_data_store_output())
    output = one.get_named_data_store_output()
    assert output.pte_data["a"].alignment == 48
    assert output.external_data["tag"]["b"].alignment == 8


def test_a_merge_that_conflicts_leaves_the_store_as_it_was() -> None:
    one, two = NamedDataStore(), NamedDataStore()
    one.add_named_data("z", b"data")
    two.add_named_data("a", b"new")
    two.add_named_data("z", b"other")
    with pytest.raises(NamedDataConflictError, match="'z'"):
        one.merge_named_data_store(two.get_named_data_store_output())
    assert list(one.get_named_data_store_output().pte_data) == ["z"]


@pytest.mark.parametrize("alignment", [0, -1])
def test_an_alignment_below_one_is_refused(alignment: int) -> None:
    with pytest.raises(ProgramError, match="expected at least 1"):
        NamedDataStore().add_named_data("a", b"", alignment)


def test_data_without_a_buffer_are_refused_with_advice() -> None:
    with pytest.raises(ProgramError, match=r"tensor\.numpy\(\)"):
        NamedDataStore().add_named_data("a", object())  # type: ignore[arg-type]
