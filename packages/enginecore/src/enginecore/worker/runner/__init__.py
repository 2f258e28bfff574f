"""Turn a step plan into model inputs, run the model, sample."""
