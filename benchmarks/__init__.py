"""Each module answers one question with figures: ``python -m benchmarks NAME [--quick]``."""
