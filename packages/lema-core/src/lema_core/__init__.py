"""lema_core: virtual memory for large language models. Import what you need from its modules."""
