"""Start, pin and time the arms of a comparison."""
