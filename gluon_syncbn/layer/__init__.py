"""What a synchronized layer is, and whether a call of it synchronizes."""
