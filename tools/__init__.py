"""Chores of the repository; nothing here is shipped."""
