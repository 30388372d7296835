"""Checkpoints as directories, and the locks on them."""
