"""A curve through points, fitted by a small network: the smallest kind of model that has every command."""
