"""The plan that is fastest where it will run: candidates lowered, run and compared."""

from lowerdeck.lowered_module.choosing.fastest import Trial, lower_fastest, trial_lines

__all__ = ["Trial", "lower_fastest", "trial_lines"]
