"""The memory of a training step: predicted on fake tensors, and fitted into a device."""
