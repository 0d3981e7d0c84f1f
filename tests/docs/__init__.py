"""The documentation: pages, README, reference, pictures."""
