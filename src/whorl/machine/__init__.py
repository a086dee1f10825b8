"""Measured properties of the machine (memory, cores, GEMM rates), compute budgets, child processes, the allocator."""
