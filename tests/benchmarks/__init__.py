"""What the commands cost, beside `cp` and beside plain torch: ``python -m tests.benchmarks``."""
