"""The command ``lowerdeck run``."""

from lowerdeck.runner.commands.running import RunCommand

__all__ = ["run", "RunCommand"]

run: RunCommand = RunCommand()
