"""The structure of inputs and outputs, from a text that nobody vouches for."""

import json
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lowerdeck.runner import load
from lowerdeck.runner.values.inputs import MAX_DEPTH, MAX_TEXT, Signature

Point = namedtuple("Point", ["x", "y"])
pytree._register_namedtuple(Point, serialized_type_name="structure_tests.Point")

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def is_known(text: str, count: int = 1) -> bool:
    return Signature(text, "", count, 0).names != [f"inputs[{index}]" for index in range(count)]


def node(kind: Any, context: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": context, "children_spec": list(children)}


def tuples(*children: Any) -> dict[str, Any]:
    return node("builtins.tuple", "null", *children)


trees = st.recursive(
    st.just(0),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3).map(OrderedDict)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)


@given(trees)
@settings(max_examples=30, deadline=None)
def test_what_torch_wrote_is_read_as_torch_reads_it(tree: Any) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    signature = Signature("", pytree.treespec_dumps(spec), 0, len(leaves))
    numbers = list(range(len(leaves)))
    assert signature.unflatten(numbers) == pytree.tree_unflatten(numbers, spec)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.sampled_from(
            ["type", "context", "children_spec", "builtins.tuple", "builtins.dict", "null", "[]"]
        ),
        lambda inner: st.lists(inner) | st.builds(node, inner, inner, inner),
    )
)
@settings(max_examples=30, deadline=None)
def test_other_texts_are_unknown(item: Any) -> None:
    for text in (json.dumps([1, item]), json.dumps(item), str(item)):
        assert not is_known(text)


HOSTILE = {
    "an enumeration": node(
        "builtins.dict", '[{"__enum__": true, "fqn": "h1_evil:A", "name": "B"}]', LEAF
    ),
    "a tuple's enumeration": node(
        "builtins.tuple", '{"__enum__": true, "fqn": "h1_evil:A", "name": "B"}', LEAF
    ),
    "a factory": node(
        "collections.defaultdict",
        {"default_factory_module": "h1_evil", "default_factory_name": "A", "dict_context": ["a"]},
        LEAF,
    ),
    "a class": node("h1_evil.A", "null", LEAF),
    "a named tuple": node("collections.namedtuple", "h1_evil.A", LEAF),
    "no named tuple": node("collections.namedtuple", "torch.Size", LEAF),
    "a container": node("collections.namedtuple", "builtins.list", LEAF),
    "too few fields": node("collections.namedtuple", "structure_tests.Point", LEAF),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_text_names_is_imported(
    name: str, method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "h1_evil.py").write_text("import enum\nclass A(enum.Enum):\n    B = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = json.dumps([1, tuples(tuples(HOSTILE[name]), node("builtins.dict", "[]"))])
    x = method.tensor([1])
    method.structure(text, text)
    forward = load(method.ends([x], [x])).method()
    assert "h1_evil" not in sys.modules
    assert forward.signature.names == ["inputs[0]"]


def test_a_class_with_a_key_for_each_child_is_read_as_a_dictionary() -> None:
    structure = node("a_model.Output", '["logits", "states"]', LEAF, tuples(LEAF))
    signature = Signature("", json.dumps([1, structure]), 0, 2)
    assert signature.unflatten([0, 1]) == {"logits": 0, "states": (1,)}
    assert signature.output_names == ["output 0 ['logits']", "output 1 ['states'][0]"]
    assert Signature("", json.dumps([1, tuples(LEAF)]), 0, 1).output_names == ["output 0"]


def deep(depth: int) -> str:
    head = '{"type": "builtins.tuple", "context": "null", "children_spec": ['
    return f"[1, {head * depth}{json.dumps(LEAF)}{']}' * depth}]"


def test_depth_and_size_are_limited() -> None:
    assert is_known(deep(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 5000):
        assert not is_known(deep(depth))
    for text in (" " * (MAX_TEXT + 1), "[" * MAX_TEXT, '{"type":' * (MAX_TEXT // 8)):
        assert not is_known(text)


def test_readable_names_cannot_outgrow_the_text() -> None:
    def keyed(length: int) -> str:
        inner = tuples(*[LEAF] * 9)
        return json.dumps([1, node("builtins.dict", json.dumps(["k" * length]), inner)])

    assert is_known(keyed(100), 9)
    assert not is_known(keyed(101), 9)
