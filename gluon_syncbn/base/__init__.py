"""What everything else stands on: the compiled core, and MXNet's private parts."""
