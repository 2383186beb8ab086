"""The compiled core, and MXNet's private parts."""
