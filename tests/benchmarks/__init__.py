"""Speed, as ratios within one interleaved run. Not part of the test suite: ``python -m tests.benchmarks``."""
