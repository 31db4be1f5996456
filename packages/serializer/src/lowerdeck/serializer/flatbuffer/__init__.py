"""Read and write FlatBuffers with their segments."""
