"""A logical program becomes the tables of a file."""

from lowerdeck.serializer.pte.encoding.encode import encode_program

__all__ = ["encode_program"]
