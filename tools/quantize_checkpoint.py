"""Quantize a model's folder: the weights of linears, experts and head in 8 or 4 bits, all else as it is.

    python tools/quantize_checkpoint.py MODEL_DIR --bits 8 --output_dir OUT
    python tools/quantize_checkpoint.py MODEL_DIR --bits 4 --output_dir OUT --format int4-64 --exclude down_proj

Reads and writes a block of rows at a time, shard by shard; stopped, the same command goes on after the last finished
one. It is ``python -m lema task=quantize`` under another name.
"""

from __future__ import annotations

import argparse
import sys

from lema.cli import main


def arguments(argv: list[str]) -> list[str]:
    """What ``python -m lema`` is told."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="a folder in Hugging Face layout, or a Hub name")
    parser.add_argument("--bits", type=int, choices=(8, 4), required=True)
    parser.add_argument("--output_dir", metavar="OUT", required=True, help="appears when it is complete")
    parser.add_argument("--format", help="int8, int4-32, int4-64, int4-128, nf4; by default what bits and backend mean")
    parser.add_argument("--backend", default="auto", help="custom, torchao, quanto, bitsandbytes, or auto")
    parser.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[], help="part of the names of tensors that stay"
    )
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    given = parser.parse_args(argv)
    options = {
        "task": "quantize",
        "model_name_or_path": given.model_dir,
        "weights_bits": given.bits,
        "output_dir": given.output_dir,
        "quant_backend": given.backend,
        "weights_format": given.format,
        "quant_exclude": ",".join(given.exclude) or None,
        "debug": str(given.debug).lower(),
    }
    return [f"{name}={value}" for name, value in options.items() if value is not None]


if __name__ == "__main__":
    sys.exit(main(arguments(sys.argv[1:])))
