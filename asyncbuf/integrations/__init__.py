"""Optional dependencies, each alone in its file."""
