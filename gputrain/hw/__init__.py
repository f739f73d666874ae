"""Hardware: facts of the machine, and the only code that sets the switches of torch."""
