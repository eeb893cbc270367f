"""Processes, signals, files and the like: what knows nothing of training."""
