"""Vision models: ViT, ResNet, and vision-language models."""
