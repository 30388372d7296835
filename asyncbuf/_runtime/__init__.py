"""Threads, tasks and arguments: what everything else runs on."""
