"""The voice: VITS from recordings with their texts to a voice that stock Piper speaks."""
