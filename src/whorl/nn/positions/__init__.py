"""Position encodings: rotary, learned, sinusoidal and ALiBi."""
