"""`.ptd` files, alone and with their program, and the store of what backends share."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowerdeck import serializer as pte
from lowerdeck_files.programs import add_program, named_data

_LAYOUT = pte.TensorLayout(pte.ScalarType.FLOAT, [2, 3], [0, 1])
_WEIGHT = bytes(range(24))
_DATA = pte.ExternalData({"weight": pte.ExternalEntry(_WEIGHT, _LAYOUT)})


def _external_program() -> pte.Program:
    program: pte.Program = add_program()
    del program.constant_buffer[1:]
    tensor = program.execution_plan[0].values[1].val
    assert isinstance(tensor, pte.Tensor)
    tensor.data_buffer_idx = 0
    tensor.extra_tensor_info = pte.ExtraTensorInfo(
        fully_qualified_name="weight", location=pte.TensorDataLocation.EXTERNAL
    )
    return program


def _layouts(size: int) -> st.SearchStrategy[pte.TensorLayout | None]:
    return st.none() | st.just(pte.TensorLayout(pte.ScalarType.BYTE, [size], [0]))


_entries = st.binary(max_size=60).flatmap(
    lambda data: st.builds(
        pte.ExternalEntry, st.just(data), _layouts(len(data)), st.sampled_from([1, 2, 3, 16, 512])
    )
)
_data = st.builds(
    pte.ExternalData,
    st.dictionaries(st.text(max_size=5), _entries, max_size=5),
    st.sampled_from([1, 16, 100, 128, 4096]),
)


@settings(deadline=None)
@given(_data)
def test_external_data_come_back(data: pte.ExternalData) -> None:
    file = pte.serialize_ptd(data)
    found = pte.deserialize_ptd(file)
    assert list(found.entries) == list(data.entries)
    for key, entry in data.entries.items():
        assert bytes(found.entries[key].data) == entry.data  # type: ignore[arg-type]
        assert found.entries[key].tensor_layout == entry.tensor_layout
    again = pte.serialize_ptd(found)
    assert pte.serialize_ptd(pte.deserialize_ptd(again)) == again


def test_what_a_store_tagged_becomes_external_data() -> None:
    store = pte.NamedDataStore()
    store.add_named_data("inside", b"1")
    store.add_named_data("weight", _WEIGHT, 16, "weights", _LAYOUT)
    assert pte.external_data(store.get_named_data_store_output()) == {
        "weights": pte.ExternalData({"weight": pte.ExternalEntry(_WEIGHT, _LAYOUT, 16)})
    }


def test_program_and_data_are_written_and_read_together(tmp_path: Path) -> None:
    paths = pte.write_model(
        _external_program(), tmp_path / "m.pte", named_data=named_data({"weights": _DATA})
    )
    assert [path.name for path in paths] == ["weights.ptd", "m.pte"]
    with pte.open_ptd(paths[0]) as file:
        view = file.entries["weight"].data
    assert bytes(view) == _WEIGHT  # type: ignore[arg-type]
    with pte.open_model(paths[1], paths[:1]) as model:
        assert bytes(model.entries["weight"].data) == _WEIGHT  # type: ignore[arg-type]
        assert model.program_file.method_names == ("forward",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pte", "weights.ptd"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "found no external data for 'weight'"),
        ({"weight": pte.ExternalEntry(_WEIGHT)}, "expected TensorLayout"),
        (
            {
                "weight": pte.ExternalEntry(
                    _WEIGHT, pte.TensorLayout(pte.ScalarType.FLOAT, [3, 2], [0, 1])
                )
            },
            r"expected TensorLayout.*\[2, 3\]",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(
    entries: dict[str, pte.ExternalEntry], message: str, tmp_path: Path
) -> None:
    with pytest.raises(pte.ProgramError, match=message):
        pte.write_model(
            _external_program(),
            tmp_path / "m.pte",
            named_data=named_data({"w": pte.ExternalData(entries)}),
        )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m.pte").write_bytes(pte.serialize_pte(_external_program()))
    pte.write_ptd(entries, tmp_path / "w.ptd")
    with pytest.raises(pte.ContentError, match=message):
        pte.open_model(tmp_path / "m.pte", [tmp_path / "w.ptd"])


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    program = _external_program()
    program.named_data.append(pte.NamedData("weight", b"1"))
    with pytest.raises(pte.ProgramError, match="'weight' twice"):
        pte.write_model(program, tmp_path / "m.pte", named_data=named_data({"w": _DATA}))


def test_a_pte_is_no_ptd_and_the_other_way_round() -> None:
    with pytest.raises(pte.MagicError, match="FT01"):
        pte.deserialize_ptd(pte.serialize_pte(add_program()))
    with pytest.raises(pte.MagicError, match="external data"):
        pte.deserialize_pte(pte.serialize_ptd({}))


@pytest.mark.parametrize("alignment", [1, 16, 24, 4096])
def test_the_layout_is_as_documented_and_equal_blobs_are_stored_once(alignment: int) -> None:
    entries = {str(i): pte.ExternalEntry(b"the same bytes" * 99) for i in range(9)}
    file = pte.serialize_ptd(entries | {"b": pte.ExternalEntry(b"marked", alignment=alignment)})
    assert file.count(b"the same bytes" * 99) == 1
    assert file.index(b"marked") % alignment == 0
    magic, length, inserted, size, base, data_size = struct.unpack_from("<4sIQQQQ", file, 8)
    assert (magic, length, inserted) == (b"FH01", 40, 48)
    assert inserted + size <= base
    assert base % 128 == 0
    assert base + data_size == len(file)


ZEROS = bytes(1000)


def stored(*entries: tuple[Any, ...]) -> pte.NamedDataStoreOutput:
    store = pte.NamedDataStore()
    for entry in entries:
        store.add_named_data(*entry)
    return store.get_named_data_store_output()


@pytest.mark.parametrize(
    ("entries", "buffers", "expected"),
    [
        (
            [("a", b"data", 16), ("b", memoryview(b"data"))],
            [b"data"],
            {"a": pte.DataEntry(0, 16), "b": pte.DataEntry(0, 1)},
        ),
        # Both alignments hold.
        ([("a", b"data", 4), ("a", b"data", 6)], [b"data"], {"a": pte.DataEntry(0, 12)}),
        # They differ only between their ends.
        (
            [("a", ZEROS), ("b", ZEROS[:200] + b"1" + ZEROS[201:])],
            [ZEROS, ZEROS[:200] + b"1" + ZEROS[201:]],
            {"a": pte.DataEntry(0, 1), "b": pte.DataEntry(1, 1)},
        ),
    ],
)
def test_equal_blobs_share_a_buffer(
    entries: list[tuple[Any, ...]], buffers: list[bytes], expected: dict[str, pte.DataEntry]
) -> None:
    output = stored(*entries)
    assert output.buffers == buffers
    assert output.pte_data == expected


def test_merging_brings_everything_over_or_changes_nothing() -> None:
    store = pte.NamedDataStore()
    before = store.get_named_data_store_output()
    store.add_named_data("a", b"data", 16)
    store.merge_named_data_store(stored(("a", b"data", 3), ("b", b"more", 8, "tag")))
    assert before.pte_data == {}
    for conflict in (stored(("c", b"new"), ("a", b"other")), stored(("a", b"other"))):
        with pytest.raises(pte.NamedDataConflictError, match="'a'") as caught:
            store.merge_named_data_store(conflict)
        assert caught.value.key == "a"
    with pytest.raises(pte.NamedDataConflictError, match="'a'"):
        store.add_named_data("a", b"other")
    output = store.get_named_data_store_output()
    assert output.pte_data == {"a": pte.DataEntry(0, 48)}
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
    with pytest.raises(pte.ProgramError, match=message):
        pte.NamedDataStore().add_named_data("a", data, alignment)
