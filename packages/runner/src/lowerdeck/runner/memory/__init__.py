"""Checks of the memory plan: what shares bytes, what is needed when, who wrote last."""
