"""Training: the step, its state, the run folder, and everything between steps."""
