"""Settings for training any torch or transformers model; re-exported from gputrain.hw."""
