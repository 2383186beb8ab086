"""What is done to whole nets."""
