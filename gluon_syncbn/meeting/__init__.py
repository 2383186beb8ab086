"""Meetings: who takes part, what they exchange, and how long they wait."""
