"""Settings of MXNet's engine, and operations that are given to it."""
