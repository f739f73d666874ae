"""From written text to the symbols that a voice is trained on, by one path in training, speech and export."""
