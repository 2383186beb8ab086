"""What MXNet's engine must be told."""
