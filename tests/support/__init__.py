"""What the tests of several folders use."""
