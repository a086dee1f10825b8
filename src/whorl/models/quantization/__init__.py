"""Weight quantization of trained models: round to nearest and GPTQ."""
