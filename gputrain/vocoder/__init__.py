"""The NSF-HiFiGAN vocoder: mel spectrogram and pitch to sound."""
