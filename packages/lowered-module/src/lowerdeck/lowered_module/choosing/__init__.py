"""The backend whose file is fastest where it will run: each is tried, run and compared."""

from lowerdeck.lowered_module.choosing.fastest import Trial, lower_fastest, trial_lines

__all__ = ["Trial", "lower_fastest", "trial_lines"]
