"""The testing helpers."""
