"""Every training method on every backend that has it."""
