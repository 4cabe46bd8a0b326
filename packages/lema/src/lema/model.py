"""LemaModel: one model over streamed weights, as a library user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lema.config import LORA, SELECTIVE_FULL, LemaConfig
from lema.planner import Machine, RunPlan, Workload, plan_run, step_choices, this_machine
from lema.prediction import tier_memory
from lema.quantized import quantized_copy
from lema.random_model import random_model
from lema_core.atomic import atomic_folder, check_free_space
from lema_core.budgets import parse_amount
from lema_core.checkpoint import TensorInfo, bind_tensors, read_generation_config, read_hf_config, read_manifest
from lema_core.device import Device, open_device
from lema_core.errors import CheckpointError, ConfigError
from lema_core.memory import process_memory_limit
from lema_core.ops.kernels import Kernels, choose_copies, choose_kernel, choose_kernels
from lema_core.planning.flight import FlightCheck, flight_check, paced
from lema_core.plugins import get_plugin_manager
from lema_core.records import Kernel, load_object
from lema_core.runtime.batch import TokenBatch
from lema_core.runtime.dry_run import DryRun
from lema_core.runtime.generation import generate_greedy
from lema_core.runtime.rehearsal import Rehearsal
from lema_core.runtime.runner import ModelRunner
from lema_core.runtime.schedule import MicroBatch, StepCosts, StepShape
from lema_core.store.budget import BudgetPlan
from lema_core.store.disk import DiskReader
from lema_core.store.fixed import fixed_weights
from lema_core.store.granules import WorkingSpace
from lema_core.store.model import cut_model
from lema_core.store.state_plan import StateCodecs
from lema_core.store.store import StoreStats, TensorStore
from lema_core.training import TrainedFiles, Training, TrainingMethodClass, WeightTraining
from lema_train.checkpoint import STATE_FILE, read_checkpoint
from lema_train.data import TextStream, Tokenizer
from lema_train.delta import DELTA_FILE, Delta, read_delta
from lema_train.lora import LoraWeights
from lema_train.lora_training import LoraTraining
from lema_train.optimizer import AdamW, Optimizer
from lema_train.peft_format import base_model, read_peft_config
from lema_train.trainer import Trainer, TrainerOptions
from lema_train.weight_files import WeightFiles, weight_values


class LemaModel:
    """A causal language model whose weights stream through windows. Use as a context manager, or call :meth:`close`.

    Nothing is loaded before the first computation; files and options are checked here. Raises ConfigError,
    CheckpointError. ``device`` replaces the one that ``config.device`` names, for devices that plugins and tests bring.
    """

    def __init__(self, config: LemaConfig, device: Device | None = None) -> None:
        if config.model_name_or_path is None and config.init != "random":
            raise ConfigError("model_name_or_path: give a folder in Hugging Face layout, a Hub name, or package:NAME")
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        plugins = get_plugin_manager()
        if config.init == "random":
            self.folder = random_model(config)
        else:
            self.folder = plugins.locate_checkpoint(config.model_name_or_path)
        hf_config = read_hf_config(self.folder)
        architecture = plugins.match_architecture(hf_config)
        self.adapter = load_object(architecture.adapter).from_hf_config(hf_config)
        self._manifest = read_manifest(self.folder)
        self._originals = bind_tensors(self._manifest, self.adapter)
        self._hf_config = hf_config
        self._device = device if device is not None else open_device(config.device, choose_copies(config.backend))
        #: what multiplies
        self.kernel = choose_kernel("linear", config.backend, self._device.torch_device.type)
        self._method: TrainingMethodClass = load_object(plugins.training_method(config.training_mode).method)
        #: the copy of the weights that is computed with, where they were quantized for this run or one before
        self.quantized = quantized_copy(config, self._manifest)
        self._bound = self._originals
        if self.quantized is not None:
            if self.quantized.made:
                # what quantizing took is the run's again
                self._device.trim()
            self._bound = bind_tensors(read_manifest(self.quantized.path), self.adapter)
        self._model = cut_model(self.adapter, self._bound)
        #: what trains; None before initialize_training() and load_lora()
        self.training: Training | None = None
        #: how memory was shared out; None before the first computation
        self.run_plan: RunPlan | None = None
        self._runner: ModelRunner | None = None
        self._tokenizer: Tokenizer | None = None
        self._flight: FlightCheck | None = None
        self._longest = config.max_seq_length
        self._typical: tuple[int, int] | None = None
        #: the checkpoint of the model's own weights that they start from
        self._started_from: Path | None = None
        self._delta: Delta | None = None
        self._states: Mapping[str, TensorInfo] | None = None

    # -- what trains

    def initialize_training(self) -> str:
        """Select what trains as the config says, and make what is new of it; returns that in one line."""
        self._require_no_runner()
        device, kernel = self._device.torch_device, self._kernels.adamw
        self.training = self._method.create(self.adapter, self.config, device, kernel)
        if self.training.weights:
            self._stream_trained(self.training.weights)
        return self.training.describe()

    def initialize_lora(self) -> str:
        """:meth:`initialize_training` of LoRA weights. Raises ConfigError in another training mode."""
        if self.config.training_mode != LORA:
            raise ConfigError(
                f"training_mode={self.config.training_mode} has no LoRA weights: call initialize_training()"
            )
        return self.initialize_training()

    def load_lora(self, path: str | Path) -> None:
        """Put the LoRA weights of a PEFT folder or checkpoint on the model."""
        self._require_no_runner()
        method = load_object(get_plugin_manager().training_method(LORA).method)
        self.training = method.load(Path(path), self.adapter, self._device.torch_device)

    def _stream_trained(self, weights: Collection[str]) -> None:
        """Cut the model anew: what trains, or trained, streams from a file of its own."""
        space = WorkingSpace(Path(self.config.output_dir).absolute() / "weights in training")
        bound = self._bound | {name: self._originals[name] for name in self._with_tied(weights)}
        self._model = cut_model(self.adapter, bound, trained=weights, space=space)

    def _with_tied(self, weights: Collection[str]) -> set[str]:
        """``weights`` and what is one tensor with them."""
        pairs = [(spec.name, spec.tied_to) for spec in self.adapter.tensors() if spec.tied_to is not None]
        found = set(weights)
        for pair in pairs:
            one, other = (self._originals[name] for name in pair)
            if one == other and found.intersection(pair):
                found.update(pair)
        return found

    @property
    def lora(self) -> LoraWeights | None:
        """The LoRA weights, None where there are none."""
        return self.training.lora if isinstance(self.training, LoraTraining) else None

    def get_trainable_parameters(self) -> list[Parameter]:
        """What an optimizer is given: the LoRA weights, fp32. Raises ConfigError before initialize_lora(), and where
        the model's own weights train, which are updated as they stream."""
        parameters = self._require_training().parameters()
        if not parameters:
            raise ConfigError(
                f"training_mode={self.config.training_mode} updates weights as they stream: it has no parameters for "
                "an optimizer"
            )
        return parameters

    def get_trainer(
        self,
        optimizer: Optimizer | None = None,
        total_steps: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Trainer:
        """A trainer with ``optimizer``, which keeps its own rate unless ``lr_schedule`` is set; by default AdamW with
        the config's.

        ``total_steps`` is the length of the schedule; default ``max_steps``.
        """
        c = self.config
        training = self._require_training()
        schedule = c.lr_schedule
        # Memory is shared out before the moments take theirs: they are counted as something still to come.
        runner = self.runner
        parameters = training.parameters()
        if optimizer is None:
            schedule = schedule or "constant"
        elif not parameters:
            raise ConfigError(
                f"training_mode={c.training_mode} updates weights as they stream, by {training.optimizer_name}: call "
                "get_trainer() without an optimizer"
            )
        if parameters and optimizer is None:
            betas, kernel = (c.adam_beta1, c.adam_beta2), self._kernels.adamw
            optimizer = AdamW(parameters, c.learning_rate, betas, c.adam_eps, c.weight_decay, kernel=kernel)
        training.optimizer = optimizer
        options = TrainerOptions(
            learning_rate=c.learning_rate,
            lr_schedule=schedule,
            warmup_steps=c.warmup_steps,
            total_steps=total_steps or c.max_steps or max(1, c.warmup_steps),
            max_grad_norm=c.max_grad_norm,
            skip_nonfinite=c.skip_nonfinite,
            max_nonfinite_steps=c.max_nonfinite_steps,
            loss_scale=None if c.loss_scale == "auto" else c.loss_scale,
            rows_per_micro_batch=c.batch_size,
            seed=c.seed,
            config=c.to_dict(),
        )
        trainer = Trainer(runner, training, self._files(), options, say)
        if self._started_from is not None:
            trainer.load_checkpoint(self._started_from)
        return trainer

    def _files(self) -> TrainedFiles:
        """What trains, in files."""
        training = self._require_training()
        if training.weights:
            return WeightFiles(training, self.runner.store, self._manifest, self._base_name())
        return training.files(self.adapter, self._base_name())

    def save_pretrained(self, path: str | Path) -> Path:
        """Write what was trained: LoRA weights as a PEFT adapter folder, weights as a delta; returns the folder. Into
        an existing folder the files are replaced one by one."""
        path, files = Path(path), self._files()
        if path.exists():
            check_free_space(path, files.weights_nbytes)
            files.write_weights(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(path, files.weights_nbytes) as temporary:
                files.write_weights(temporary)
        return path

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> LemaModel:
        """The model that a PEFT folder or a checkpoint was trained on, with its LoRA weights. ``options`` override the
        run's config."""
        path = Path(path)
        weights = (path / DELTA_FILE).is_file()
        values: dict[str, Any] = {"training_mode": SELECTIVE_FULL if weights else LORA}
        if (path / STATE_FILE).exists():
            values |= json.loads((path / STATE_FILE).read_text(encoding="utf-8"))["config"]
        named = read_delta(path).identity.name if weights else base_model(read_peft_config(path))
        if named is not None and values.get("init") != "random":
            # The run's own option may be relative to a folder that is another now.
            values["model_name_or_path"] = named
        values |= options
        if values.get("model_name_or_path") is None:
            raise CheckpointError(
                f"{path}/adapter_config.json names no base model; give model_name_or_path to from_pretrained"
            )
        model = cls(LemaConfig.from_dict(values))
        if weights:
            model.load_delta(path)
        else:
            model.load_lora(path)
        return model

    def load_delta(self, path: str | Path, trains: bool = True) -> None:
        """Start from the weights of a checkpoint of a training of the model's own weights; a trainer goes on from its
        moments and step. ``trains`` False: only to compute with, in the room of the weights alone. Raises
        CheckpointError when it was made from another base."""
        self._require_no_runner()
        path = Path(path)
        delta = read_delta(path)
        delta.check_base(self._manifest)
        delta.check_fits(self.adapter)
        if (path / STATE_FILE).exists():
            self._states = read_checkpoint(path)[1]
        if trains:
            self.initialize_training()
            self._started_from = path if self._states is not None else None
        elif delta.tensors:
            self._stream_trained(delta.tensors)
        self._delta = delta

    # -- computing

    def logits(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """fp32 [B, T, V] on the CPU for int64 ids [B, T], without dropout."""
        batch = TokenBatch.of(input_ids, attention_mask)
        batch.check_ids(self.adapter.vocab_size)
        return self.runner.logits(batch)

    def generate_ids(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] | None = None,
        kv_chunk_size: int | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Greedy continuation of each prompt; ``stop_ids`` default to the model's own. See generate_greedy."""
        return generate_greedy(
            self.runner,
            prompts,
            max_new_tokens,
            self.stop_ids if stop_ids is None else stop_ids,
            kv_chunk_size or self.config.kv_chunk_size,
            self._kv_budget(),
            on_token,
        )

    def _kv_budget(self) -> int | None:
        """Bytes of keys and values, which stay where they are computed with: in RAM only where that is the device's."""
        shares = self._device.shares_ram
        limit = process_memory_limit().bytes if shares else self._device.free_bytes()
        options = ("kv_vram", "kv_ram") if shares else ("kv_vram",)
        given = (parse_amount(getattr(self.config, option), limit, option) for option in options)
        return min((nbytes for nbytes in given if nbytes is not None), default=None)

    def generate_kv(
        self,
        prompt: str,
        tokenizer: Any = None,
        max_new_tokens: int = 200,
        kv_chunk_size: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Greedy text after ``prompt``; returns prompt and continuation. ``tokenizer`` needs encode and decode;
        default: the model's own.

        ``on_text`` is given each new piece as it comes. An empty prompt starts from the tokenizer's BOS.
        """
        tokenizer = tokenizer if tokenizer is not None else self.tokenizer
        ids = list(tokenizer.encode(prompt))
        if not ids:
            bos = getattr(tokenizer, "bos_token_id", getattr(tokenizer, "bos_id", None))
            if bos is None:
                raise ConfigError("prompt: it is empty and the tokenizer has no BOS to start from")
            ids = [bos]
        return prompt + self.continue_text(ids, tokenizer, max_new_tokens, kv_chunk_size, on_text)

    def continue_text(
        self,
        ids: Sequence[int],
        tokenizer: Any,
        max_new_tokens: int,
        kv_chunk_size: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """The text that follows ``ids``, without them and without special tokens."""
        stops = set(self.stop_ids)
        stream = TextStream(tokenizer)
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            if piece and on_text is not None:
                on_text(piece)

        def on_token(row: int, token: int) -> None:
            if token not in stops:
                show(stream.feed(token))

        self.generate_ids([ids], max_new_tokens, None, kv_chunk_size, on_token)
        show(stream.flush())
        return "".join(pieces)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's folder. Raises ConfigError when it has more ids than the model has
        embeddings."""
        if self._tokenizer is None:
            tokenizer = Tokenizer.from_folder(self.folder)
            if tokenizer.vocab_size > self.adapter.vocab_size:
                raise ConfigError(
                    f"{self.folder}: the tokenizer has {tokenizer.vocab_size} ids, "
                    f"the model's embedding {self.adapter.vocab_size} rows"
                )
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def tokenizer_or_none(self) -> Tokenizer | None:
        """The tokenizer, None where the model's folder has none: token ids can be trained on without."""
        return self.tokenizer if (self.folder / "tokenizer.json").is_file() else None

    @property
    def fill_id(self) -> int:
        """The id that padded places of a batch hold; never looked at."""
        tokenizer = self.tokenizer_or_none
        return 0 if tokenizer is None else tokenizer.fill_id

    @property
    def stop_ids(self) -> list[int]:
        """End-of-sequence ids of generation_config.json and config.json."""
        found: list[int] = []
        for source in (read_generation_config(self.folder), self._hf_config):
            ids = source.get("eos_token_id")
            found += [ids] if isinstance(ids, int) else list(ids or [])
        return sorted(set(found))

    # -- memory

    @property
    def runner(self) -> ModelRunner:
        """Opened at first use: then the windows are sized, and nothing is read yet. Raises BudgetError when a run
        cannot fit."""
        if self._runner is None:
            plan = self.run_plan = self.plan()
            updates = self.training.updates if self.training is not None else {}
            read, widen = self._kernels.read, self._kernels.widen
            fixed = None
            if self._delta is not None and self.training is None:
                values = weight_values(self._model, self._delta, self._states)
                fixed = fixed_weights(self._model, Path(self.config.output_dir), values)
            store = TensorStore(
                self._model, self._device, plan.sizes, plan.prefetch_distance, read, widen, plan.states(), fixed
            )
            if isinstance(self.training, WeightTraining):
                self.training.opened(store)
                store.set_weights(weight_values(self._model, self._delta, self._states))
            self._runner = ModelRunner(
                self.adapter,
                self._model,
                store,
                updates,
                self._kernels,
                plan.scheduler,
                plan.activations(self._device),
                self._most_bytes(plan),
                store.gradients,
            )
        return self._runner

    def _most_bytes(self, plan: RunPlan) -> int | None:
        """What is planned for the process; None where no step is."""
        if plan.work.shape is None or not plan.machine.shares_ram:
            return None
        return tier_memory(plan)["ram"].total

    @cached_property
    def _kernels(self) -> Kernels:
        return self._new_kernels()

    def _new_kernels(self) -> Kernels:
        """The run's kernels; what those that measure keep between products is gone with them."""
        c = self.config
        return choose_kernels(c.backend, self._device.torch_device.type, weights_compute=c.weights_compute)

    @property
    def budget(self) -> BudgetPlan | None:
        """What the windows and activations were given, and why; None before the first computation."""
        return None if self.run_plan is None else self.run_plan.budget

    def expect_tokens(self, longest: int, typical: tuple[int, int] | None = None) -> None:
        """Rows will have at most so many tokens: less is set aside for activations than ``max_seq_length`` would
        need. ``typical``: tokens of a row and targets of a micro-batch in the mean, which a step's time is predicted
        for; None: all rows are the longest, and every token has a target."""
        self._longest = min(longest, self.config.max_seq_length)
        self._typical = typical

    @property
    def _multiplied_by(self) -> str:
        """The kernel of products, by all that sets its speed."""
        name = _versioned(self.kernel)
        return f"{name} w8a8" if self.config.weights_compute == "w8a8" else name

    def flight_check(self, refresh: bool = False, say: Callable[[str], None] = lambda text: None) -> FlightCheck:
        """What this machine does with this model's file and kernel, measured once (about two seconds) and kept;
        ``refresh`` measures again."""
        if self._flight is None or refresh:
            largest = max(self._bound.values(), key=lambda info: info.segment.nbytes).segment.path
            read = choose_kernel("read", self.config.backend, "cpu")
            kernels = self._new_kernels()
            self._flight = flight_check(
                largest,
                self._device,
                kernels.linear,
                self._model.matrix_dtype,
                self._multiplied_by,
                DiskReader(kernels.read),
                _versioned(read),
                refresh,
                say,
                self._model.matrix_format,
            )
            del kernels
            self._device.trim()
        return self._flight

    def plan(self, machine: Machine | None = None) -> RunPlan:
        """How a run would use ``machine`` (default: this one), without reading a weight. Raises BudgetError when it
        cannot fit."""
        if machine is not None and machine.flight is None:
            dtype = getattr(torch, machine.rates.compute_dtype)
            return plan_run(self.config, machine, self._workload(dtype, Kernels()))
        work = self._workload(self._device.compute_dtype(self._model.matrix_dtype), self._kernels)
        if machine is None:
            flight = self.flight_check()
            # Before the process's memory is looked at: a dry run loads 15 MB of torch's code that the first step needs.
            step_choices(work, flight.hardware, self.config.gradient_checkpointing)
            machine = this_machine(self.config, self._device, flight)
            if work.shape is not None and not self._model.trained:
                machine = self._paced(machine, work)
        return plan_run(self.config, machine, work)

    def _paced(self, machine: Machine, work: Workload) -> Machine:
        """``machine`` with rates at which this model's steps compute."""

        def rehearse() -> float:
            run = RunPlan(self.config, machine, work)
            updates, dtype = self.training.updates, self._device.compute_dtype(self._model.matrix_dtype)
            kernels = self._new_kernels()
            rehearsal = Rehearsal(self.adapter, self._model, updates, dtype, kernels, self._device)
            window_bytes = run.near_slots * self._model.layout.slot_bytes
            return rehearsal.pace(work.costs, work.typical, run.schedule, machine.rates, window_bytes)

        steps = f"{type(self.adapter).__name__} {work.costs.looks(work.typical)}"
        flight = paced(machine.flight, steps, rehearse)
        return replace(machine, rates=flight.hardware, flight=flight)

    def _workload(self, dtype: torch.dtype, kernels: Kernels) -> Workload:
        c, training = self.config, self.training
        updates = {} if training is None else training.updates
        shape = typical = None
        if training is not None:
            rows, tokens = c.batch_size, self._longest
            one = MicroBatch(rows, tokens, rows * (tokens - 1), self.adapter.masks(tokens))
            how = training.largest_pass(c.seed)
            shape = typical = StepShape((one,) * c.gradient_accumulation_steps, how.first_layer, embeds=how.embeds)
            if self._typical is not None:
                tokens, targets = self._typical
                one = MicroBatch(rows, tokens, targets, self.adapter.masks(tokens))
                typical = StepShape((one,) * c.gradient_accumulation_steps, how.first_layer, embeds=how.embeds)
        weights = frozenset(() if training is None else training.weights)
        costs = StepCosts(DryRun(self.adapter, self._model, updates, dtype, kernels, weights))
        trained = training.numbers if training is not None and not weights else 0
        codecs = self._codecs if weights else None
        turns = training.turns if isinstance(training, WeightTraining) else ()
        return Workload(self._model, costs, shape, typical, c.batch_size, self._longest, trained, codecs, turns)

    @cached_property
    def _codecs(self) -> StateCodecs:
        """How moments and gradients of weights are kept."""

        def made(option: str, *kinds: str) -> dict[str, Any]:
            bits = getattr(self.config, option)
            if bits is None:
                return {}
            codec = load_object(get_plugin_manager().state_codec(bits, option).codec)
            return {kind: codec(kind) for kind in kinds}

        return StateCodecs(**made("opt_state_bits", "exp_avg", "exp_avg_sq"), **made("grad_acc_bits", "grads"))

    @property
    def working_bytes(self) -> int:
        """Of the disk, that files of a run without a name may come to take: weights that train, and their states."""
        updates = self.runner.store.updates
        return 0 if updates is None else updates.disk_bytes

    def stats(self) -> dict[str, StoreStats]:
        """Bytes now, peak, read and written per kind of stream, and the seconds compute waited."""
        return self.runner.stats()

    def close(self) -> None:
        """Stop the threads and free the windows; safe to call twice."""
        if self._runner is not None:
            self._runner.close()

    def __enter__(self) -> LemaModel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _base_name(self) -> str:
        """What adapter_config.json calls the base model: a path that holds from any folder, or the name as given."""
        given = str(self.folder if self.config.init == "random" else self.config.model_name_or_path)
        return str(Path(given).absolute()) if Path(given).exists() else given

    def _require_training(self) -> Training:
        if self.training is None:
            begin = "initialize_lora" if self.config.training_mode == LORA else "initialize_training"
            raise ConfigError(f"nothing trains yet: call {begin}(), or load_lora(path)")
        return self.training

    def _require_no_runner(self) -> None:
        if self._runner is not None:
            raise ConfigError("LoRA weights are put on a model before it first computes; open the model again")


def _versioned(kernel: Kernel) -> str:
    """A kernel's name and variant, with the version of the distribution that it comes from, as first-party and other
    plugins name theirs."""
    made_in = version(kernel.impl.partition(".")[0].replace("_", "-"))
    return " ".join([kernel.name, made_in, *([kernel.variant()] if kernel.variant else [])])
