"""Training kernels in C++, compiled on the machine and used where they were timed to be faster."""
