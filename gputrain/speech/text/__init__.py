"""Text front ends: convert written text to the symbols of a voice, equally in training, inference and export."""
