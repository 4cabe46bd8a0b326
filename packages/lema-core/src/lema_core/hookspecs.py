"""Every point where a plugin can take part, in one page.

A plugin is a module named by an entry point of the group ``lema``, in the ``pyproject.toml`` of any package::

    [project.entry-points.lema]
    qwen = "lema_qwen.plugin"

The module defines functions named after the hooks below and marks them::

    from lema_core.hookspecs import hookimpl

Arguments are passed by name and may be left out, so a hook can grow an argument without breaking anyone. Plugins are
loaded in a fixed order, lema's own packages first and the others by name. A plugin that cannot be imported, implements
a hook that does not exist, or yields something that is no record or has a name already taken, is left out as a whole:
one warning says why, and everything else goes on.

There are three sorts of hooks. *Registries* are asked once, when the plugins are loaded; all answers are collected. Of
the *one answer* hooks, the plugin loaded last is asked first and the first answer that is not None counts;
``@hookimpl(tryfirst=True)`` and ``trylast=True`` change that. *Observers* are told; what they return is ignored, and an
exception they raise ends the run.

A hook call costs about 10 microseconds: hooks run when a run is put together and once a step, never per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from lema_core.records import Architecture, CheckpointSource, Kernel, QuantBackend, StateCodec, TrainingMethod

if TYPE_CHECKING:
    from lema_core.store.budget import BudgetPlan, BudgetRequest

PROJECT = "lema"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ----------------------------------------------------------------------------------------------------------- registries


@hookspec
def lema_architectures() -> Iterable[Architecture]:
    """Model architectures this package supports.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.Architecture` per
    architecture. ``adapter`` names a :class:`~lema_core.adapter.ModelAdapter` subclass; it is imported when a model of
    that architecture is opened, not before.

    All answers are collected. Names are unique, and so is each entry of ``model_types``: to serve a model type that
    another plugin has, leave ``model_types`` empty and answer :func:`lema_match_architecture`.

    Example::

        from lema_core.hookspecs import hookimpl
        from lema_core.records import Architecture

        @hookimpl
        def lema_architectures():
            yield Architecture("qwen2", model_types=("qwen2",), adapter="lema_qwen.qwen2:Qwen2Adapter")
    """


@hookspec
def lema_checkpoint_sources() -> Iterable[CheckpointSource]:
    """Ways to turn what the user wrote as ``model_name_or_path`` into a local folder in Hugging Face layout.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.CheckpointSource`
    per way.

    All answers are collected; names are unique. For each model the sources are asked by falling ``priority``, and the
    first whose ``refuses(ref)`` returns None locates it. When all refuse, the user sees every reason, so a reason is a
    short clause that says what is missing: "not a .tar file". ``refuses`` is quick and uses no network.

    Example::

        import tarfile
        import tempfile
        from pathlib import Path

        from lema_core.hookspecs import hookimpl
        from lema_core.records import CheckpointSource

        def refuses(ref):
            return None if ref.endswith(".tar") and Path(ref).is_file() else "not a .tar file"

        def locate(ref):
            folder = Path(tempfile.mkdtemp())
            with tarfile.open(ref) as archive:
                archive.extractall(folder, filter="data")
            return folder

        @hookimpl
        def lema_checkpoint_sources():
            yield CheckpointSource("tar", refuses, locate, priority=10)
    """


@hookspec
def lema_kernels() -> Iterable[Kernel]:
    """Implementations of single operations, such as ``linear``, for a kind of device.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.Kernel` per
    operation and kind of device. ``device_type`` is torch's (``cpu``, ``cuda``), or ``"*"`` for any.
    ``unsupported(request)`` returns the reasons why it cannot serve a request, each a short clause; an empty list means
    that it can. The reference kernels are named ``torch`` and have priority 0.

    All answers are collected; (``op``, ``device_type``, ``name``) is unique. Of those that can serve, the one with the
    highest ``priority`` is used, unless the user names one.

    Example::

        from lema_core.hookspecs import hookimpl
        from lema_core.records import Kernel

        def unsupported(request):
            return []

        @hookimpl
        def lema_kernels():
            yield Kernel("blocked", op="linear", device_type="cpu", impl="lema_blocked.linear:BlockedLinear",
                         priority=10, unsupported=unsupported)
    """


@hookspec
def lema_training_methods() -> Iterable[TrainingMethod]:
    """Ways of training, such as LoRA: what trains, and when.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.TrainingMethod`
    per way; ``name`` is what users write as ``training_mode``, ``method`` names a
    :class:`~lema_core.training.TrainingMethodClass`, which is imported when a run asks for it.

    The class makes a :class:`~lema_core.training.Training` of the run's options. Where it trains the model's own
    weights it derives from :class:`~lema_core.training.WeightTraining` and is left with saying which, and at which
    step; that they stream, are saved and go on from a checkpoint is no affair of its own. Options that only this method
    has are read of ``method_options`` by :func:`lema_core.method_options.read_options`.

    All answers are collected; names are unique.

    Example::

        # lema_norms/method.py: training_mode=norms
        from lema_core.training import AdamWOptions, WeightTraining

        class Norms(WeightTraining):
            @classmethod
            def create(cls, adapter, options, device, kernel):
                norms = [spec for spec in adapter.tensors() if spec.role == "norm"]
                adamw = AdamWOptions.of(options, norms)
                return cls(adapter, [spec.name for spec in norms], adamw, options.learning_rate, kernel)

            def describe(self):
                return f"{len(self.weights)} norms train"

        # lema_norms/plugin.py
        from lema_core.hookspecs import hookimpl
        from lema_core.records import TrainingMethod

        @hookimpl
        def lema_training_methods():
            yield TrainingMethod("norms", method="lema_norms.method:Norms")
    """


@hookspec
def lema_state_codecs() -> Iterable[StateCodec]:
    """Codecs that keep optimizer states and gradient accumulators in fewer bits.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.StateCodec` per
    number of bits; ``codec`` names the class and is imported when it is used. An object is made for each kind of state,
    ``exp_avg``, ``exp_avg_sq`` or ``grads``, and used by several threads at once. ``lema_core.testing.codec_suite`` is
    its exam.

    All answers are collected; names are unique, and so is ``bits``: it is all that users write.

    Example::

        import torch

        from lema_core.hookspecs import hookimpl
        from lema_core.records import StateCodec

        class Bfloat16Codec:
            def __init__(self, kind):
                self.kind = kind

            def nbytes(self, n):
                return 2 * n

            def encode(self, values, encoded):
                encoded.view(torch.bfloat16).copy_(values)

            def decode(self, encoded, values):
                values.copy_(encoded.view(torch.bfloat16))

        @hookimpl
        def lema_state_codecs():
            yield StateCodec("bfloat16", bits=16, codec="lema_bfloat16.codec:Bfloat16Codec")
    """


@hookspec
def lema_quant_backends() -> Iterable[QuantBackend]:
    """Backends that encode weights in fewer bits.

    Called once, without arguments, when the plugins are loaded. Yield one :class:`~lema_core.records.QuantBackend` per
    wire format; ``name`` is what users write as ``quant_backend``, ``bits`` as ``weights_bits``, ``format`` as
    ``weights_format``. ``codec`` names what makes a :class:`~lema_core.quantization.codec.WeightCodec` without
    arguments, imported when it is used; its ``format`` is one of lema's own wire formats or the plugin's own
    :class:`~lema_core.quantization.formats.WireFormat`, which then needs no more than this to be stored, streamed and
    computed with. ``lema_core.testing.weight_codec_suite`` is its exam.

    All answers are collected; (``name``, ``format``) is unique. ``quant_backend=auto`` takes the first that is not
    ``unavailable``, by falling ``priority``, unless :func:`lema_choose_quant_backend` says otherwise.

    Example::

        import torch

        from lema_core.hookspecs import hookimpl
        from lema_core.quantization.codec import WeightCodec, row_absmax, row_chunks
        from lema_core.quantization.formats import Int8Rows
        from lema_core.records import QuantBackend

        class ClippedCodec(WeightCodec):
            # int8, each row clipped at nine tenths of its largest number
            format = Int8Rows()

            def encode(self, weight, parts):
                for rows, (codes, scale), first in row_chunks(weight, parts):
                    scale.copy_(row_absmax(rows, first)).mul_(0.9 / 127)
                    step = scale.where(scale > 0, 1)[:, None]
                    codes.copy_((rows.float() / step).round_().clamp_(-127, 127))

        @hookimpl
        def lema_quant_backends():
            yield QuantBackend("clipped", bits=8, format="int8", codec="lema_clipped.codec:ClippedCodec", priority=-1)
    """


@hookspec
def lema_config_packages() -> Iterable[str]:
    """Importable packages that hold further YAML files for the command line.

    Called once, without arguments, when the plugins are loaded. Yield dotted package names; each package contains
    folders like those of ``lema.conf`` (``model/qwen2_7b.yaml`` makes ``+model=qwen2_7b`` work) and an ``__init__.py``.

    All answers are collected, each package once. On a clash of files the package loaded first wins, so lema's own files
    cannot be replaced by accident.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_config_packages():
            yield "lema_qwen.conf"
    """


# ----------------------------------------------------------------------------------------------------------- one answer


@hookspec(firstresult=True)
def lema_match_architecture(hf_config: Mapping[str, object]) -> str | None:
    """Which architecture serves this model?

    Called once per model that is opened, with ``hf_config``, its parsed ``config.json``, not to be changed. Return the
    name of a registered architecture, or None to leave the question to others. Needed only where ``model_type`` does
    not decide.

    The first answer that is not None counts. When nobody answers, the architecture whose ``model_types`` has the
    model's ``model_type`` serves it.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_match_architecture(hf_config):
            if hf_config.get("model_type") == "llama" and "my_router" in hf_config:
                return "routed_llama"
    """


@hookspec(firstresult=True)
def lema_choose_quant_backend(bits: int, device: str, available: tuple[str, ...]) -> str | None:
    """Which backend quantizes the weights where the user leaves it open (``quant_backend=auto``)?

    Called once per run and number of bits, when more than one backend can serve, with ``bits``, what weights get;
    ``device``, torch's name for the kind of device that computes; and ``available``, the names of those that can serve,
    lema's own choice first. Return one of these names, or None to leave the question to others.

    The first answer that is not None counts. When nobody answers, the backend of highest priority serves.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_choose_quant_backend(bits, device, available):
            return "custom" if bits == 4 and "custom" in available else None
    """


@hookspec(firstresult=True)
def lema_plan_budget(request: BudgetRequest) -> BudgetPlan | None:
    """How many bytes does each tier give to each kind of tensor stream?

    Called once per run, before anything moves, with ``request``, which holds what the model needs and what the machine
    and the user's options give. Return a plan, or None to leave it to others. A plan that exceeds what the request
    gives is refused.

    The first answer that is not None counts. When nobody answers, lema plans by itself.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_plan_budget(request):
            return None  # look at the request, keep lema's own plan
    """


# ------------------------------------------------------------------------------------------------------------ observers


@hookspec
def lema_run_started(config: object) -> None:
    """A run is about to begin.

    Called once per run, after the model is open and before the first step, with ``config``, the run's ``LemaConfig``.
    Nothing is returned.

    Every plugin is told.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_run_started(config):
            print("training", config.model_name_or_path)
    """


@hookspec
def lema_step_finished(step: int, metrics: Mapping[str, object]) -> None:
    """An optimizer step is done.

    Called once per optimizer step, with ``step``, counted from 1 and through resumed runs, and ``metrics``, the object
    that ``metrics.jsonl`` gets for this step (``loss``, ``lr``, ``step_s`` ...), not to be changed. It runs between two
    steps, so it should be quick. Nothing is returned.

    Every plugin is told.

    Example::

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_step_finished(step, metrics):
            print(step, metrics["loss"])
    """


@hookspec
def lema_checkpoint_saved(path: Path, step: int) -> None:
    """A checkpoint is complete under its final name.

    Called after each save, with ``path``, the folder, and ``step``, the step it holds. Older checkpoints may be removed
    later (``save_total_limit``), so copy what should stay. Nothing is returned.

    Every plugin is told.

    Example::

        import shutil

        from lema_core.hookspecs import hookimpl

        @hookimpl
        def lema_checkpoint_saved(path, step):
            shutil.copytree(path, f"/backup/step-{step}")
    """
