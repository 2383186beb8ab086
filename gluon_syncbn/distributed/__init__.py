"""The other processes of a job, and the engines that connect them."""
