"""gputrain trains image VAEs, vocoders, voices and speech recognisers at the limit of the GPU at hand."""

__version__ = "0.2.0"
