"""The example project: demo, live page."""
