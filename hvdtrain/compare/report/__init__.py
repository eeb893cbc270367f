"""Show a comparison: terminal, HTML page, pictures."""
