"""Change the code a little, many times, and see whether a test fails."""
