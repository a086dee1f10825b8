"""Properties of the machine at hand, measured: memory, cores, GEMM rates, compute budgets."""
