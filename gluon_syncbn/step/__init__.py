"""Steps: how far they have come, and how they end: with an update, an error, an exit or a fork."""
