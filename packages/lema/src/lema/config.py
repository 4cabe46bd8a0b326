"""LemaConfig: every option of a run, for the library, YAML files and the command line alike.

The field's metadata is the one place that says what an option means and what it may be; ``python -m lema --help``
prints it, and every assignment, by the constructor or later, goes through it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cache
from typing import Any

from lema.options import (
    Option,
    amount,
    bits,
    choice,
    flag,
    integer,
    mapping,
    names,
    number,
    only_null,
    path,
    size,
    text,
)
from lema.quant_options import check_quantization, read_pattern, read_quant_backend, read_weights_format
from lema_core.errors import ConfigError
from lema_core.suggest import did_you_mean

#: what the package trains itself; plugins bring more
LORA, SELECTIVE_FULL = "lora", "selective_full"
#: options that say how LoRA weights are made, and those that say how a model's own weights train
LORA_OPTIONS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora")
FULL_OPTIONS = ("trainable_modules", "opt_state_bits", "grad_acc_bits", "grad_accum_backend")


class MemoryStrategy(Enum):
    """STREAMING: weights pass through windows of the size the budgets give. RESIDENT: everything stays, the oracle."""

    STREAMING = "streaming"
    RESIDENT = "resident"


def _device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value.lower()):
        raise ValueError
    return value.lower()


def _training_mode(value: str) -> str:
    name = value.lower()
    if name in (LORA, SELECTIVE_FULL):
        return name
    from lema_core.plugins import get_plugin_manager

    methods = {each.lower(): each for each in (LORA, SELECTIVE_FULL, *get_plugin_manager().training_methods())}
    if name not in methods:
        known = ", ".join(methods.values())
        raise ConfigError(f"{value!r} is not allowed; what exists: {known}{did_you_mean(value, methods.values())}")
    return methods[name]


def _resume(value: str) -> str:
    # YAML and OmegaConf make false a bool or the text 'False'
    words = {"none": "none", "null": "none", "false": "none", "auto": "auto", "true": "auto"}
    if not value.strip():
        raise ValueError
    return words.get(value.lower(), value)


def _module_suffix(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+(\.\w+)*", value):
        raise ValueError
    return value


def _layer(value: Any) -> int | str:
    if isinstance(value, bool):
        raise ValueError
    if re.fullmatch(r"\d+", str(value)):
        return int(value)
    if re.fullmatch(r"(first|last):[1-9]\d*|emb|head", str(value).lower()):
        return str(value).lower()
    raise ValueError


_MODEL, _TRAIN, _LORA, _DATA, _OPTIM = "Model and task", "What is trained", "LoRA", "Data", "Optimization"
_RUN, _MEMORY, _PLAN, _GENERATE = "Run, files and resuming", "Memory", "Planning", "Generation"
_QUANT = "Quantized weights"
_MERGE = "Merging"


@dataclass(kw_only=True)
class LemaConfig:
    """Every option of a run. All have defaults; a value that is not allowed raises ConfigError when it is assigned."""

    task: str = choice(
        "train", _MODEL, "What to do.", ("train", "generate", "evaluate", "quantize", "merge", "plan", "doctor")
    )
    model_name_or_path: str | None = path(
        None,
        _MODEL,
        "A folder in Hugging Face layout, a name on the Hub (org/name, org/name@revision), or package:NAME for a model "
        "inside an installed package.",
    )
    init: str = choice(
        "checkpoint",
        _MODEL,
        "Weights from the checkpoint, or random ones from seed: an untrained model of hf_config's architecture, to try "
        "a run with.",
        ("checkpoint", "random"),
    )
    hf_config: dict[str, Any] | None = mapping(
        _MODEL,
        "A config.json for init=random, as +model=NAME sets it; null takes that of the folder model_name_or_path. A "
        "checkpoint's own is always read from its folder.",
    )
    model_overrides: dict[str, Any] | None = mapping(
        _MODEL, "Fields of hf_config to change for init=random, such as {num_hidden_layers:2,hidden_size:64}."
    )
    lora_path: str | None = path(
        None,
        _MODEL,
        "LoRA weights to put on the model for generate, evaluate and merge: a PEFT folder or a checkpoint of a run.",
    )
    delta_path: str | None = path(
        None,
        _MODEL,
        "Whole weights that were trained, for generate, evaluate and merge: a checkpoint of a run that has a "
        "delta.safetensors, or that file.",
    )
    device: str = text(
        "auto",
        _MODEL,
        "Where to compute: auto (CUDA if there is one), cpu, cuda, cuda:N.",
        "auto, cpu, cuda, cuda:N",
        _device,
    )
    backend: str = choice(
        "auto",
        _MODEL,
        "What multiplies: cpp (native code of lema-cuda), python (plain torch), auto (the best that serves here). "
        "They differ by rounding.",
        ("auto", "cpp", "python"),
    )
    num_threads: int | None = integer(None, _MODEL, "Threads to compute with; null leaves torch's choice.", 1)

    training_mode: str = text(
        LORA,
        _TRAIN,
        "lora trains LoRA weights beside those of the model, selective_full the model's own: all, or what "
        "trainable_modules and trainable_layers name. Plugins may bring more.",
        "lora, selective_full, or what a plugin brings",
        _training_mode,
    )
    trainable_modules: list[str] = names(
        [],
        _TRAIN,
        "With selective_full: parts of tensors' paths, of which everything at and below trains, such as q_proj, mlp, "
        "input_layernorm, c_attn.bias, experts.gate_up_proj; empty means everything within trainable_layers.",
        "a list of module names such as [q_proj,mlp]",
        _module_suffix,
    )
    trainable_layers: list[int | str] = names(
        [],
        _TRAIN,
        "The blocks that train or get LoRA, by number, first:N or last:N; with selective_full also emb (the embedding "
        "tables) and head (the output projection). Empty means all.",
        "a list of layer numbers, first:N and last:N with N from 1, emb and head",
        _layer,
    )
    method_options: dict[str, Any] | None = mapping(
        _TRAIN,
        "Options that the training_mode of a plugin has beside these, such as {switch_block_every:50}; its README says "
        "which.",
    )
    lora_rank: int = integer(16, _LORA, "Rank r of the update W + alpha / r * B A.", 1)
    lora_alpha: float = number(
        32.0, _LORA, "Scale of the update: alpha / r, so 2 at the defaults (PEFT's own default is 8).", 0, open_low=True
    )
    lora_dropout: float = number(0.0, _LORA, "Dropout on what goes into A.", 0, 1)
    lora_target_modules: str | list[str] = names(
        "all-linear",
        _LORA,
        "What gets LoRA: all-linear (as in PEFT: all but the head), or ends of module names, [q_proj,mlp.up_proj].",
        "all-linear, or module names such as [q_proj,v_proj]",
        _module_suffix,
        word="all-linear",
    )
    use_rslora: bool = flag(False, _LORA, "Scale by alpha / sqrt(r) instead of alpha / r.")

    train_file: str | None = path(
        None, _DATA, "Training rows, a JSONL file; demo means the small set that lema brings."
    )
    eval_file: str | None = path(None, _DATA, "Evaluation rows, a JSONL file.")
    eval_split: float = number(
        0.0, _DATA, "Share of train_file that is held out for evaluation when there is no eval_file.", 0, 1
    )
    max_seq_length: int = integer(1024, _DATA, "Tokens of a row; longer rows are cut.", 2)
    batch_size: int = integer(1, _DATA, "Rows of a micro-batch.", 1)
    gradient_accumulation_steps: int = integer(1, _DATA, "Micro-batches of an optimizer step.", 1)

    learning_rate: float = number(1e-4, _OPTIM, "Largest learning rate of AdamW.", 0, open_low=True)
    lr_schedule: str | None = choice(
        None, _OPTIM, "How the rate goes on after warm-up; null is constant.", ("constant", "linear", "cosine")
    )
    warmup_steps: int = integer(0, _OPTIM, "Optimizer steps over which the rate rises linearly.", 0)
    weight_decay: float = number(0.0, _OPTIM, "Decoupled weight decay of AdamW.", 0)
    adam_beta1: float = number(0.9, _OPTIM, "AdamW's decay of exp_avg.", 0, 1)
    adam_beta2: float = number(0.999, _OPTIM, "AdamW's decay of exp_avg_sq.", 0, 1)
    adam_eps: float = number(1e-8, _OPTIM, "AdamW's epsilon.", 0, open_low=True)
    max_grad_norm: float | None = number(
        1.0,
        _OPTIM,
        "Gradients are scaled down to this norm over all trained tensors; null does not.",
        0,
        open_low=True,
        null=True,
    )
    max_steps: int | None = integer(None, _OPTIM, "Optimizer steps in all; null means num_epochs decides.", 1)
    num_epochs: int = integer(1, _OPTIM, "Passes over the training rows, unless max_steps is given.", 1)
    skip_nonfinite: bool = flag(
        True,
        _OPTIM,
        "Leave a step out whole when its loss or a gradient is infinite or NaN. false together with max_grad_norm=null "
        "lets selective_full update each tensor as soon as its own gradient is complete, which then is never stored.",
    )
    max_nonfinite_steps: int = integer(
        5, _OPTIM, "Skipped steps in a row, with infinite or NaN values, that end the run.", 1
    )
    loss_scale: float | str = number(
        "auto",
        _OPTIM,
        "Factor on the loss while gradients are computed, taken off them before they count. auto is 1, but for "
        "a model in fp16, where it is as large as gradients stay finite.",
        0,
        open_low=True,
        word="auto",
    )
    seed: int = integer(0, _OPTIM, "Seed of LoRA's start, the order of rows, dropout, and init=random.", 0, 2**63 - 1)

    output_dir: str = path("checkpoints", _RUN, "Folder for checkpoints, metrics.jsonl and summary.json.")
    save_steps: int | None = integer(
        500, _RUN, "Optimizer steps between checkpoints; null saves at the end only.", 1, null=True
    )
    save_total_limit: int | None = integer(None, _RUN, "Checkpoints to keep, the newest; null keeps all.", 1)
    resume: str = text(
        "none",
        _RUN,
        "Go on from a checkpoint: none, auto (the newest in output_dir), or its folder.",
        "none, auto or the folder of a checkpoint",
        _resume,
        words=True,
    )
    eval_steps: int | None = integer(
        None, _RUN, "Optimizer steps between evaluations; null evaluates at the end only.", 1
    )
    eval_at_start: bool = flag(
        False, _RUN, "Evaluate before the first step too; summary.json then has figures before and after."
    )
    debug: bool = flag(False, _RUN, "Show the full traceback of an error.")

    strategy: MemoryStrategy = choice(
        MemoryStrategy.STREAMING,
        _MEMORY,
        "Stream weights through windows, or keep everything resident.",
        MemoryStrategy,
    )
    weights_vram: str = amount(_MEMORY, "Window of weights in device memory.")
    weights_ram: str = amount(_MEMORY, "Window of weights in RAM.")
    kv_vram: str = amount(_MEMORY, "Keys and values of generation in device memory.")
    kv_ram: str = amount(_MEMORY, "Keys and values of generation in RAM.")
    opt_state_vram: str = amount(_MEMORY, "Optimizer states in device memory.")
    opt_state_ram: str = amount(_MEMORY, "Optimizer states in RAM.")
    grad_acc_vram: str = amount(_MEMORY, "Accumulated gradients in device memory.")
    grad_acc_ram: str = amount(_MEMORY, "Accumulated gradients in RAM.")
    activations_vram: str = amount(_MEMORY, "What the forward pass keeps for the backward pass in device memory.")
    activations_ram: str = amount(_MEMORY, "What the forward pass keeps for the backward pass in RAM.")
    device_budget: str = amount(
        _MEMORY, "All that lema may use of the device's memory; auto is what is free, less a reserve."
    )
    ram_budget: str = amount(
        _MEMORY, "All the memory this process may use; auto is its cgroup's limit or what is free."
    )
    prefetch_distance: int | None = integer(
        None, _MEMORY, "Transfers to run ahead of the compute; null lets the planner say.", 1
    )
    gradient_checkpointing: bool | None = flag(
        None,
        _MEMORY,
        "Recompute a block's activations in the backward pass (true), keep them (false), or as memory allows (null).",
    )
    opt_state_bits: int | None = bits(
        _MEMORY, "Bits of each number of stored optimizer states, with selective_full; null is fp32."
    )
    grad_acc_bits: int | None = bits(
        _MEMORY, "Bits of each number of accumulated gradients, with selective_full; null is fp32."
    )
    grad_accum_backend: str = choice(
        "auto",
        _MEMORY,
        "Where gradients of the model's own weights are added up: ram, disk, or auto, in RAM as far as grad_acc_ram "
        "goes.",
        ("auto", "ram", "disk"),
    )
    kv_bits: int | None = only_null(
        _MEMORY, "Bits of cached keys and values.", "this version caches them as they are computed"
    )
    target_step_time_ms: int | None = integer(
        None, _MEMORY, "Take the least memory whose predicted step is as short as this; null takes what there is.", 1
    )

    weights_bits: int | None = bits(
        _QUANT,
        "Bits of the weights of linears, experts and head, which are quantized once, into a folder of the cache that "
        "later runs use too; null takes them as the checkpoint has them, quantized or not. With 4, a head has 8.",
        (8, 4),
    )
    quant_backend: str = text(
        "auto",
        _QUANT,
        "What quantizes: custom (lema's own), torchao, quanto, bitsandbytes, what a plugin brings, or auto, the first "
        "that is installed of torchao, quanto, bitsandbytes, custom.",
        "auto, custom, torchao, quanto, bitsandbytes, or what a plugin brings",
        read_quant_backend,
    )
    weights_format: str | None = text(
        None,
        _QUANT,
        "How weights lie: int8 (a scale for each row), int4-32, int4-64, int4-128 (a scale for so many columns), nf4; "
        "null is int8 or the backend's own with 4 bits.",
        "int8, int4-32, int4-64, int4-128, nf4, or what a plugin brings",
        read_weights_format,
    )
    weights_compute: str = choice(
        "auto",
        _QUANT,
        "What multiplies quantized weights: dequant (they are widened to what activations have), w8a8 (activations "
        "are rounded to 8 bits too, token by token, which changes numbers), auto (never w8a8).",
        ("auto", "dequant", "w8a8"),
    )
    quant_exclude: list[str] = names(
        [],
        _QUANT,
        "Tensors that stay as they are: parts of their names, or shell patterns, such as [mlp.down_proj,layers.0.*].",
        "a list of parts of tensor names such as [down_proj,lm_head]",
        read_pattern,
    )

    hardware: str | None = path(
        None, _PLAN, "The machine that task=plan plans for: t4, rtx4090, h200, or FILE.yaml; null is this machine."
    )
    plot: bool = flag(False, _PLAN, "task=plan draws memory and transfers over one step, to output_dir/plan.png.")

    prompt: str | None = text(None, _GENERATE, "What task=generate goes on from.")
    chat: bool | None = flag(
        None, _GENERATE, "Take the prompt as a user's message of a chat; null: when the model has a chat template."
    )
    max_new_tokens: int = integer(200, _GENERATE, "Tokens that task=generate adds at most.", 0)
    eval_max_new_tokens: int = integer(64, _GENERATE, "Tokens that task=evaluate generates for one row at most.", 0)
    kv_chunk_size: int = integer(8192, _GENERATE, "Tokens of keys and values kept and attended to together.", 1)

    merge_dtype: str = choice(
        "keep",
        _MERGE,
        "What task=merge stores weights as: keep (each as the base has it), or another type for all.",
        ("keep", "float32", "bfloat16", "float16"),
    )
    max_shard_size: int | None = size(
        _MERGE, "Largest file of weights that task=merge writes, such as 5GB; null keeps the base's files."
    )

    def __new__(cls, *_: Any, **given: Any) -> LemaConfig:
        for name in given:
            cls.option(name)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise ConfigError(
                f"warmup_steps: {self.warmup_steps} is more than max_steps {self.max_steps}; the rate is never reached"
            )
        if self.eval_file is not None and self.eval_split > 0:
            raise ConfigError(
                f"eval_split: {self.eval_split} and eval_file {self.eval_file!r} contradict; give one of them"
            )
        has_rows = self.eval_file is not None or self.eval_split > 0 or self.train_file == "demo"
        if self.eval_steps is not None and not has_rows:
            raise ConfigError(f"eval_steps: {self.eval_steps} has nothing to evaluate; give eval_file or eval_split")
        if self.model_overrides and self.init != "random":
            raise ConfigError(
                "model_overrides: they are for init=random; a checkpoint's config.json says what the model is"
            )
        if self.task != "plan" and self.hardware is not None:
            raise ConfigError(f"hardware: {self.hardware!r} is for task=plan; task={self.task} runs on this machine")
        if self.task != "plan" and self.plot:
            raise ConfigError(f"plot: true is for task=plan, which draws a step; task={self.task} draws nothing")

        self._check_mode()
        check_quantization(self)

    def _check_mode(self) -> None:
        """Options of one training mode given together with another."""
        foreign = {LORA: FULL_OPTIONS, SELECTIVE_FULL: LORA_OPTIONS}.get(self.training_mode, ())
        other = SELECTIVE_FULL if self.training_mode == LORA else LORA
        for name in foreign:
            if getattr(self, name) != _defaults(type(self))[name]:
                raise ConfigError(
                    f"{name}: {getattr(self, name)!r} is for training_mode={other}, and training_mode is "
                    f"{self.training_mode}; leave one of them out"
                )
        if self.method_options and self.training_mode in (LORA, SELECTIVE_FULL):
            raise ConfigError(
                f"method_options: {self.method_options!r} is for a training_mode that a plugin brings, and "
                f"training_mode is {self.training_mode}; leave one of them out"
            )
        outside = [each for each in self.trainable_layers if each in ("emb", "head")]
        if self.training_mode == LORA and outside:
            raise ConfigError(
                f"trainable_layers: {outside[0]!r} is for training_mode={SELECTIVE_FULL}, and training_mode is {LORA}; "
                "lora_target_modules=[lm_head] puts LoRA on the head"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self.option(name).read(name, value))

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Every option by name, in the order of the fields."""
        return _options(cls)

    @classmethod
    def option(cls, name: str) -> Option:
        """One option. Raises ConfigError with a near match for a name that does not exist."""
        known = _options(cls)
        if name not in known:
            raise ConfigError(
                f"unknown option {name!r}{did_you_mean(name, known) or '; python -m lema --help lists all'}"
            )
        return known[name]

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`from_dict` reads back, made of JSON's types only."""
        values = {name: getattr(self, name) for name in self.options()}
        return {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LemaConfig:
        """A config from a mapping of option names; missing ones have their defaults."""
        return cls(**values)


@cache
def _options(cls: type[LemaConfig]) -> dict[str, Option]:
    return {field.name: field.metadata["option"] for field in fields(cls)}


@cache
def _defaults(cls: type[LemaConfig]) -> dict[str, Any]:
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(cls)
    }
