"""Limits: writers and readers that hold each other back, and waits that nobody can end."""
