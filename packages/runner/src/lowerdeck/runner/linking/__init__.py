"""From the instructions of a file to what runs them."""
