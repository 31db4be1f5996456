"""A hook of mkdocs that adds the page of benchmark results to the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add ``benchmarks/RESULTS.md`` as a page."""
    page = File.generated(
        config, "benchmarks/index.md", abs_src_path=str(_BENCHMARKS / "RESULTS.md")
    )
    files.append(page)
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make ``mkdocs serve`` watch the page."""
    config.watch.append(str(_BENCHMARKS / "RESULTS.md"))
    return config
