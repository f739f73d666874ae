"""What a GPU is asked within minutes: `alive`, `measure` and `learn`, which benchmarks/gpu.sh starts."""
