"""The commands ``lowerdeck run`` and ``lowerdeck backends``."""

from lowerdeck.runner.commands.listing import BackendsCommand
from lowerdeck.runner.commands.running import RunCommand

__all__ = ["run", "backends", "RunCommand", "BackendsCommand"]

run: RunCommand = RunCommand()
backends: BackendsCommand = BackendsCommand()
