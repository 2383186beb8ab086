"""MXNet's graphs, read and rewritten."""
