"""What an operator's emitter is given: the call, and the payload that grows."""
