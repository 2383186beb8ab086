"""The fallback: MXNet's own operators, and vectors that cross devices in Python."""
