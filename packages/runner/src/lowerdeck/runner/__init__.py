"""Run, watch and compare .pte programs in Python."""

from lowerdeck.runner.errors import RunnerError

__all__ = ["RunnerError"]
