"""The other processes of a job, and the communicators that connect them."""
