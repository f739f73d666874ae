"""Audio code that several models share: spectrograms, files, pitch."""
