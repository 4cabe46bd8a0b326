"""Opens GGUF files of Llama models in lema: each is converted once to a cached folder in Hugging Face layout."""
