"""The cost of the commands, next to `cp` and plain torch: ``python -m tests.benchmarks``."""
