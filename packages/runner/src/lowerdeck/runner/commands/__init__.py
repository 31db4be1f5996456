"""The commands ``lowerdeck run`` and ``lowerdeck backends``."""

from lowerdeck.runner.commands.backends import BackendsCommand
from lowerdeck.runner.commands.run import RunCommand

__all__ = ["run", "backends", "RunCommand", "BackendsCommand"]

run = RunCommand()
backends = BackendsCommand()
