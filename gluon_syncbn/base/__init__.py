"""The ground floor: the compiled core, and MXNet's private parts."""
