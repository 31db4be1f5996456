"""Importing reads what writing and reading need; all else is there at its first use."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import lowerdeck.serializer as serializer


def test_importing_reads_no_part_that_writing_and_reading_never_need() -> None:
    code = """
        import sys
        import lowerdeck.serializer as serializer

        def loaded():
            return {name.split(".")[2] for name in sys.modules if name.startswith(f"{package}.")}

        package = "lowerdeck.serializer"
        later = {"kernels", "report", "verify", "xnnpack"}
        assert not loaded() & later, sorted(loaded() & later)
        assert set(serializer.__all__) <= set(dir(serializer))
        for name in serializer.__all__:
            getattr(serializer, name)
        assert later <= loaded()
        assert set(serializer.__all__) <= set(vars(serializer))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(AttributeError, match=r"lowerdeck\.serializer.*no_such_name"):
        _ = serializer.no_such_name  # type: ignore[attr-defined]
