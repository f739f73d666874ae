"""gputrain trains image VAEs, vocoders and voices at the limit of the GPU at hand."""

__version__ = "0.1.0"
