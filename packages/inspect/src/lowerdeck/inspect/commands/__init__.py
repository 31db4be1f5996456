"""The commands of the ``lowerdeck`` script in this package; none imports torch."""
