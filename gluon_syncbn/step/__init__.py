"""Steps: how far they have come, what gives them up, and what ends them at an exit or a fork."""
