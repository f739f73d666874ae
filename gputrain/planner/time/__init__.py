"""The time of a training step on a GPU: its operators, what a compiler makes of them, and a roofline."""
