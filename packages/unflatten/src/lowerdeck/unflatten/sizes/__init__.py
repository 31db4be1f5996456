"""Sizes that vary: how they follow from others, and which the program was recorded for."""
