"""What importing the package brings, and what comes at its first use."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
import sys
import lowerdeck.lowered_module as package
late = ("lowerdeck.emitter", "lowerdeck.inspect.report")
assert not {"torch._dynamo", "sympy"} & set(sys.modules)  # a second of imports
assert not [name for name in late if name in sys.modules]
assert set(package.__all__) <= set(dir(package))
for name in package.__all__:
    getattr(package, name)
assert not [name for name in late if name not in sys.modules]
"""


def test_authors_of_backends_do_not_import_the_emitter() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True)
