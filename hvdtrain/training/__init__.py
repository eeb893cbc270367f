"""The user's Task, and the one training loop (Trainer), without a branch for a particular backend
or launcher.
"""
