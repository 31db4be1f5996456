"""Test helpers without torch: small files, XNNPACK payloads, a ``shell`` fixture."""

from pathlib import Path

DATA = Path(__file__).with_name("data")
"""Files that ExecuTorch made."""
