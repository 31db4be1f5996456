"""Names of modules, state and arguments that could break generated code."""

from __future__ import annotations

import builtins
import copy
import io
import linecache
import pickle
from typing import Any

import pytest
import torch
from hostile_files import WORD, arguments, hostile_file, program  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.export import export, load
from unflatten_zoo import Case  # type: ignore[import-not-found]
from unflatten_zoo.judges import compare_calls, judge_state  # type: ignore[import-not-found]

from lowerdeck.unflatten import export_preserving, unflatten

X = torch.randn(2, 4)

NAMES = (
    *("layer1", "layer10", "a@b", "n@1", "0", "class", "self", "x", "weight with spaces", "a-b"),
    # Names of our modules' parts.
    *("graph", "code", "call_modules", "print_readable", "recompile", "meta", "_call_1"),
    *("type_name", "tree_summary", "graph_module", "swappable", "check_input_constraints"),
    # Python's parser takes these for other letters: "\u03bc", "fi", "K".
    *("\u00b5", "\u03bc", "\ufb01", "fi", "\u212a", "K", "\uff18", "True", "__debug__"),
    *("a\nb", "'", '"', "\\", "\0", "\ud800", "getattr"),
)


class Scaled(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self._parameters["meta"] = nn.Parameter(torch.ones(2) + number)
        self._buffers["graph"] = torch.ones(2) * number

    def forward(self, x: Tensor) -> Any:
        factor: Any = self._parameters["meta"]
        added: Any = self._buffers["graph"]
        return x * factor + added


class Named(nn.Module):
    """Children under every name, called by way of the registry as eager code must."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for number, name in enumerate(names):
            self._modules[name] = nn.Sequential(nn.Linear(2, 2), nn.Identity(), Scaled(number))

    def forward(self, x: Tensor) -> Any:
        children: dict[str, Any] = self._modules
        for name in self.names:
            x = children[name](x)
        return children["layer10"](x)


# Torch's own names of signatures have an "@" before the number of a call.
SIGNED = tuple(name for name in NAMES if "@" not in name)


@pytest.mark.parametrize(("names", "way"), [(NAMES, "plain"), (SIGNED, "preserving")])
def test_modules_and_state_of_every_name(names: tuple[str, ...], way: str) -> None:
    case = Case("every name", lambda: Named(names), lambda: (torch.randn(1, 2),))
    judge_state(case, way)
    module = case.unflattened(way)
    for subject in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module):
        compare_calls(case, subject)


KEYWORDS = tuple(
    name
    for name in (
        *NAMES,
        "type",
        "forward",
        "args",
        "arg_0",
        "keyword_0",
        "kwargs",
        "len",
        "dict",
        "_others",
        "",
    )
    # Python takes no further "self" and "x"; export fails on the others.
    if name not in {"self", "x", "0", "class", "__debug__", ""}
)


class Keywords(nn.Module):
    """Takes arguments under every name that a caller can give, and nested dicts with such keys."""

    def forward(self, x: Tensor, nested: Any, **kwargs: Tensor) -> Any:
        for number, name in enumerate(KEYWORDS):
            x = x + kwargs[name] * number - nested[name][0]
        return {name: x * number for number, name in enumerate(KEYWORDS)}


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Keywords()

    def forward(self, x: Tensor, nested: Any, **kwargs: Tensor) -> Any:
        return self.inner(x, nested, **kwargs)


def _keyword_inputs() -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    kwargs = {name: torch.randn(2) for name in KEYWORDS}
    return (torch.ones(2), {name: [torch.randn(2)] for name in KEYWORDS}), kwargs


@pytest.mark.parametrize("record", [export, export_preserving])
def test_arguments_of_every_name(record: Any) -> None:
    eager = CallsByKeyword()
    args, kwargs = _keyword_inputs()
    module: Any = unflatten(record(eager, args, kwargs))
    torch.testing.assert_close(module(*args, **kwargs), eager(*args, **kwargs))
    if record is export_preserving:
        found = module.inner(*args, **kwargs)
        torch.testing.assert_close(found, eager.inner(*args, **kwargs))
        module.inner = Keywords()
        torch.testing.assert_close(module(*args, **kwargs), eager(*args, **kwargs))
    with pytest.raises(TypeError, match="a-b"):
        module(*args, **{name: value for name, value in kwargs.items() if name != "a-b"})
    with pytest.raises(TypeError, match="another"):
        module(*args, **kwargs, **{"another one": torch.ones(2)})


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
    for code in (*codes, module.print_readable(print_output=False)):
        assert all(line.isprintable() for line in code.split("\n"))
    for name, entry in linecache.cache.items():
        if name.startswith("<lowerdeck.unflatten") and len(entry) == 4:
            assert all(line.endswith("\n") and line[:-1].isprintable() for line in entry[2])
