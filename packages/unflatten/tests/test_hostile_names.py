"""Whatever a saved program says of names and source lines, it is text and runs nothing."""

from __future__ import annotations

import builtins
import io
import linecache
from typing import Any

import pytest
import torch
from hostile_files import WORD, arguments, hostile_file, program  # type: ignore[import-not-found]
from torch.export import load

from lowerdeck.unflatten import unflatten
from lowerdeck.unflatten.calls.python_names import on_one_line
from lowerdeck.unflatten.code.code import write_source

RUN = "setattr(*[__import__('builtins')] + ['attacked'] + [1])"
TEXTS = {
    "dots": "\n__import__('builtins').attacked = 1\n",
    "line feed": f"\n{RUN}\n",
    "indented line": f"\n    {RUN}\n",
    "carriage return": f"\r{RUN}\r",
    "both": f"\r\n{RUN}\r\n",
    "form feed": f"\x0c\n{RUN}\x0b",
    "separators": f"\u2028{RUN}\u2029\x85\x1c\x1d{RUN}",
    "quote": f"'+{RUN}+'",
    "double quote": f'"+{RUN}+"',
    "triple quotes": f'"""\n{RUN}\n"""',
    "triple single quotes": f"'''\n{RUN}\n'''",
    "backslash": f"\\'\n{RUN}\\",
    "continued": f"\\\n{RUN}\\",
    "null": f"\0\n{RUN}\0",
    "parenthesis": f"):\n    {RUN}\ndef forward(*args",
    "statement": f"=0\n{RUN}\n#",
    "braces": "{" + RUN + "}{{%s%n",
    "direction": "\u202e\u2066#",
    "letters of other scripts": "µΩé変ﬁ",
}


@pytest.mark.parametrize("preserve", [False, True], ids=["flat", "preserved"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_of_a_file_is_never_code(text: str, preserve: bool) -> None:
    exported = program(preserve=preserve)
    saved = hostile_file(exported, text)
    args, kwargs = arguments(WORD)
    # It writes the program's own buffers.
    wanted = exported.module()(*args, **kwargs)[f"o{WORD}"]
    loaded = load(io.BytesIO(saved))
    assert not hasattr(builtins, "attacked"), "torch.export.load itself ran it"
    module: Any = unflatten(loaded)
    args, kwargs = arguments(text)
    found = module(*args, **kwargs)
    torch.testing.assert_close(found[f"o{text}"], wanted)
    assert not hasattr(builtins, "attacked")
    _check_every_line_is_one_line(module)


def _check_every_line_is_one_line(module: Any) -> None:
    codes = [inner.code for inner in module.modules() if hasattr(inner, "code")]
    shown = module.print_readable(print_output=False), module.tree_summary()
    for code in (*codes, *shown):
        assert all(line.isprintable() for line in code.split("\n"))
    for name, entry in linecache.cache.items():
        if name.startswith("<lowerdeck.unflatten") and len(entry) == 4:
            assert all(line.endswith("\n") and line[:-1].isprintable() for line in entry[2])


@pytest.mark.parametrize("text", [text for text in TEXTS.values() if "." not in text])
def test_text_of_a_graph_is_never_code(text: str) -> None:
    class Answers:
        """An object that has whatever it is asked for."""

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: (name, args, kwargs)

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    state = graph.create_node("get_attr", f"state{text}")
    called = graph.call_method(f"method{text}", (x, text), {f"key{text}": {text: [text]}})
    graph.output((state, called, graph.call_function(dict, (), {text: slice(text, None)}), text))
    for node in graph.nodes:
        node.meta["stack_trace"] = f'File "{text}", line 1, in {text}\n    {text}\n'
    source = write_source(graph)
    module = torch.nn.Module()
    setattr(module, f"state{text}", 1)
    found = source.compile()(module, Answers())
    method = f"method{text}", (text,), {f"key{text}": {text: [text]}}
    assert found == (1, method, {text: slice(text, None)}, text)
    assert not hasattr(builtins, "attacked")


def test_escapes_take_at_most_four_letters_for_a_byte() -> None:
    letters = map(chr, range(0x110000))
    grown = (len(on_one_line(c)) / len(c.encode("utf-8", "surrogatepass")) for c in letters)
    assert max(grown) == 4
