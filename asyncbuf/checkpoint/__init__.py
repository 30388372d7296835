"""Snapshots on disk: plain values, directories, whole training runs."""
