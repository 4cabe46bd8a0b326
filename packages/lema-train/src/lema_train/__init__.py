"""Training over streamed weights: LoRA, AdamW, schedules, checkpoints and data."""
