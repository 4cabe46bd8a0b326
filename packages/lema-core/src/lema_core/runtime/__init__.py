"""Steps of a model over streamed weights: training, evaluation, generation."""
