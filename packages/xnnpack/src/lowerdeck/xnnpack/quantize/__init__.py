"""Making quantised programs: where PT2E is to quantise, and in which numbers."""
