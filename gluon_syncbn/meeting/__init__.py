"""The meetings of devices and processes: their members, their exchanges, and how long they wait."""
