"""Side effects of fine-tuning: forgetting, exposure bias, invented answers, refusal and over-refusal."""
