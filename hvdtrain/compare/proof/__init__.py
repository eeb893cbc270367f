"""Check that every arm did the same work, and diagnose why not."""
