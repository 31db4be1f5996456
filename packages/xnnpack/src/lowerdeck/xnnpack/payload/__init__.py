"""The payload: what it is made of, the order of its dimensions, and its bytes."""
