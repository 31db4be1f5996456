"""From the instructions of a file to what runs them."""

from lowerdeck.runner.linking.linking import Linker

__all__ = ["Linker"]
