"""Which operators torch takes apart before the emitter reads the graph, and how."""
