"""One rank of a model on its device: worker, runner, sampling, models, weights."""
