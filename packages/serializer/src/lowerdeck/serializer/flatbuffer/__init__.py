"""FlatBuffers as bytes: tables read from a buffer, and written to one, with its segments."""
