"""Rows of text to batches of token ids: tokenizer, chat templates, answer masks, JSONL, order, the demo set."""

from __future__ import annotations

from lema_train.data.batching import (
    Batch,
    BatchLoader,
    BatchPlan,
    make_batch,
    total_supervised_tokens,
    typical_micro_batch,
)
from lema_train.data.chat_template import ChatTemplate
from lema_train.data.demo import demo_rows, write_demo
from lema_train.data.mask import IGNORED, describe_sample, encode_chat
from lema_train.data.rows import Dataset, Report, Sample, load_samples
from lema_train.data.split import split_dataset
from lema_train.data.tokenizer import TextStream, Tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchLoader",
    "BatchPlan",
    "ChatTemplate",
    "Dataset",
    "Report",
    "Sample",
    "TextStream",
    "Tokenizer",
    "demo_rows",
    "describe_sample",
    "encode_chat",
    "load_samples",
    "make_batch",
    "split_dataset",
    "total_supervised_tokens",
    "typical_micro_batch",
    "write_demo",
]
