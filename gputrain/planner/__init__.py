"""Prediction and measurement of memory, and the choice of micro-batch and checkpointing."""
