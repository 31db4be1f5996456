"""The commands of the ``lowerdeck`` script that this package brings; none imports torch."""
