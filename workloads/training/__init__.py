"""Parts of fine-tuning: samples, rows, methods, adapters, the step."""
