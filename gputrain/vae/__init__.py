"""The image VAE: data, model, losses, training, evaluation, export."""
