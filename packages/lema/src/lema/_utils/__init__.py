"""What works on files alone, without a model that is open."""
