"""What a call returned when it was recorded, and what is looked at once its module was changed."""

from lowerdeck.unflatten.results.given_back import GIVEN_BACK, GivenBack, argument_of, nodes_given
from lowerdeck.unflatten.results.recorded_results import result_checks
from lowerdeck.unflatten.results.result_check import SIZES, sizes_of
from lowerdeck.unflatten.results.returned import RETURNS, Returned, recorded_result
from lowerdeck.unflatten.results.state_sizes import StateCheck, state_check

__all__ = [
    "GIVEN_BACK",
    "RETURNS",
    "SIZES",
    "GivenBack",
    "Returned",
    "StateCheck",
    "argument_of",
    "nodes_given",
    "recorded_result",
    "result_checks",
    "sizes_of",
    "state_check",
]
