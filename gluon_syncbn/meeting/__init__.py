"""Who meets, what they exchange, and how long they wait."""
