"""What one call is, and the template that it becomes."""
