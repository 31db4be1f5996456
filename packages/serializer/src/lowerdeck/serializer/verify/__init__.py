"""What a program must hold so that the official runtime neither crashes nor errs."""
