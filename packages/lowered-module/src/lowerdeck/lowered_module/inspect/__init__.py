"""What a lowered program shows of itself."""
