"""Work on whole nets."""
