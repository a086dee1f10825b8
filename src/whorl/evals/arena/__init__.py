"""Arena: blind votes between models, and their Bradley-Terry ratings."""
