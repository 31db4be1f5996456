"""The errors that this package raises."""


class SerializerError(Exception):
    """Base of every error that ``lowerdeck.serializer`` raises on purpose."""
