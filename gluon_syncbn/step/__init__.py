"""What must happen around a step, an exit and a fork."""
