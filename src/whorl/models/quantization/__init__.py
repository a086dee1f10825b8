"""Weight quantisation of trained models: round to nearest and GPTQ."""
