"""What is counted, read and found."""
