"""What the user trains (Task), and the one loop (Trainer), which knows no backend and no launcher
by name.
"""
