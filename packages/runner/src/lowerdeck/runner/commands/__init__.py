"""The commands ``lowerdeck run``, ``lowerdeck bundle`` and ``lowerdeck backends``."""

from lowerdeck.runner.commands.bundling import BundleCommand
from lowerdeck.runner.commands.listing import BackendsCommand
from lowerdeck.runner.commands.running import RunCommand

__all__ = ["run", "bundle", "backends", "RunCommand", "BundleCommand", "BackendsCommand"]

run: RunCommand = RunCommand()
bundle: BundleCommand = BundleCommand()
backends: BackendsCommand = BackendsCommand()
