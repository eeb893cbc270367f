"""The job: which rank this is, on which host, by which launcher, and the store of all ranks."""
