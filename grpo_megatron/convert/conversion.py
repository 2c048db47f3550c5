"""The two conversions. All checks come before the first byte is written; only input hashes are compared during writing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.adapters import AdaptedModel
from grpo_megatron.convert.layout import RELEASE, TRACKER_FILE, tracked_folder
from grpo_megatron.convert.megatron import FORMAT_FILE, MegatronFolder, write_checkpoint
from grpo_megatron.convert.options import (
    MergeOptions,
    ToHfOptions,
    ToMegatronOptions,
)
from grpo_megatron.convert.output import Progress, check_target, output_folder
from grpo_megatron.convert.source import FLOATS, HFFolder, Source, write_shards
from grpo_megatron.models.architecture import Architecture, fitting_sizes, split_problems
from grpo_megatron.models.heads.reward_folder import WHAT
from grpo_megatron.models.lora.peft_folder import ADAPTER_CONFIG, PeftFolder, is_peft_folder
from grpo_megatron.models.weights.stream import WeightsError
from grpo_megatron.storage.files import MANIFEST_FILE, is_partial, write_manifest
from grpo_megatron.storage.hub import model_folder
from grpo_megatron.storage.run_files import CRITIC_FOLDER, REWARD_MODEL_FOLDER, STEP_FILE
from grpo_megatron.untrusted import ReadError, path_problem, shown, special_file_in

OVERHEAD_BYTES = 64 << 20  # estimated: tokenizer and tables of contents


def hf_to_megatron(options: ToMegatronOptions) -> None:
    """Converts a Hugging Face folder to one that Megatron-LM loads, with config.json and tokenizer in hf/.

    Raises ConvertError, StorageError, UnsupportedModel.
    """
    source = options.source
    check_target(options.target, source, options.force)
    model = open_source(source, family=options.family)
    if isinstance(model, MegatronFolder) or (isinstance(model, AdaptedModel) and model.is_step):
        raise ConvertError(f"{str(source)!r} is a Megatron-Core checkpoint already; to-hf converts it")
    if model.head:
        raise ConvertError(
            f"{str(source)!r} is {WHAT[model.head]}. Nothing reads such a model from a Megatron-Core checkpoint: critic.path,"
            " reward_model.path and the model.path of train-reward take this folder as it is"
        )
    check_model_layout(model.arch, options.tp, options.pp, options.ep)
    wanted = model.dtype(options.dtype)
    with _conversion(model, options, "megatron") as (folder, hashes, progress):
        (folder / RELEASE).mkdir()
        written = write_checkpoint(model, folder / RELEASE, wanted, progress)
        hashes.update({f"{RELEASE}/{name}": sha256 for name, sha256 in written.items()})
        (folder / TRACKER_FILE).write_text(RELEASE)
        if model.extras is not None:  # no checkpoint of Megatron-Core has a place for them
            (folder / "hf").mkdir()
            extras = write_shards(model, folder / "hf", wanted, 0, progress, only_extras=True)
            hashes.update({f"hf/{name}": sha256 for name, sha256 in extras.items()})


def megatron_to_hf(options: ToHfOptions) -> None:
    """Converts a distributed checkpoint (converted, a training step, its critic/ or reward_model/) to a Hugging Face folder.

    A policy with LoRA becomes a PEFT folder. `merge` makes a full model of such a step, or of a PEFT folder.
    Raises ConvertError, StorageError.
    """
    source = options.source
    check_target(options.target, source, options.force)
    model = open_source(source, hf=options.hf, family=options.family)
    if isinstance(options, MergeOptions):
        if not isinstance(model, AdaptedModel):
            raise ConvertError(f"{str(source)!r} has no adapters that could be merged")
    elif isinstance(model, AdaptedModel) and model.is_step and model.head is None:
        _write_adapters(model, options)
        return
    elif isinstance(model, HFFolder) or (isinstance(model, AdaptedModel) and not model.is_step):
        merged = " (merge makes the whole model of adapters)" if isinstance(model, AdaptedModel) else ""
        raise ConvertError(f"{str(source)!r} is a Hugging Face folder already; to-megatron converts it{merged}")
    with _conversion(model, options, "hf") as (folder, hashes, progress):
        hashes.update(write_shards(model, folder, model.dtype(options.dtype), options.shard_size, progress))


def _write_adapters(model: AdaptedModel, options: ToHfOptions) -> None:
    with output_folder(options.target, OVERHEAD_BYTES) as folder:
        with model.checked(not options.no_hashes), Progress("to-hf", 0, options.quiet) as progress:
            progress.total = model.write_adapters(folder, FLOATS[options.dtype] if options.dtype else None)
            progress.add(progress.total)
        _copy_companions(model.tokenizer_folder, folder)
        model.complete(folder)
        write_manifest(folder, "hf", {})


def _copy_companions(source: Path, target: Path) -> None:
    for path in companions(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


@contextlib.contextmanager
def _conversion(
    model: Source, options: ToMegatronOptions | ToHfOptions, kind: str
) -> Iterator[tuple[Path, dict[str, str], Progress]]:
    """Checks tokenizer and space before the block, and writes config and manifest after it. Both directions share it.

    The block gets the folder to write into, a table to fill with file -> sha256, and the progress.
    """
    wanted, hashes = model.dtype(options.dtype), dict[str, str]()
    total = model.num_bytes(wanted) + model.extra_bytes
    with output_folder(options.target, total + OVERHEAD_BYTES) as folder:
        with model.checked(not options.no_hashes):
            label = "merge" if isinstance(options, MergeOptions) else f"to-{kind}"
            with Progress(label, total, options.quiet) as progress:
                yield folder, hashes, progress
            hf_folder = folder / "hf" if kind == "megatron" else folder
            hf_folder.mkdir(exist_ok=True)
            (hf_folder / "config.json").write_bytes(model.config_text(wanted))
            for origin in (model.hf_folder, model.tokenizer_folder)[not isinstance(model, AdaptedModel) :]:
                _copy_companions(origin, hf_folder)
            model.complete(hf_folder)
        write_manifest(folder, kind, hashes)


# -- finding the model in a folder -------------------------------------------------------------------------------------

PART_FOLDERS = (CRITIC_FOLDER, REWARD_MODEL_FOLDER)  # of a training step, besides the policy
EXPORT_FOLDER = "hf"  # of a run's output folder


def open_source(folder: Path, *, hf: Path | None = None, family: str | None = None) -> Source:
    """Returns the model in `folder`, in either format, or of the Hub, by its id. Raises ConvertError, UnsupportedModel.

    `family`: `package.module:FAMILY` of the user's own; None: the one that config.json names.
    """
    for path in filter(None, (folder, hf)):
        if problem := path_problem(path):
            raise ConvertError(f"{shown(str(path))} cannot be opened: {problem}")
    try:
        folder = model_folder(folder)
    except ReadError as error:
        raise ConvertError(f"{str(folder)!r}: {error}") from error
    for path in filter(None, (folder, hf)):
        if not path.is_dir():
            raise ConvertError(f"{str(path)!r} is not a folder{_part_hint(path)}")
        if special := special_file_in(path):
            raise ConvertError(f"{str(path)!r} holds {special}; remove it")
    if is_partial(folder):
        raise ConvertError(f"{str(folder)!r} was left by an interrupted conversion; convert again, or remove it")
    if tracked_folder(folder.parent) == folder:
        folder = folder.parent
    places = (folder, folder / "state", tracked_folder(folder) or folder)
    if any((place / FORMAT_FILE).exists() for place in places):
        step = MegatronFolder(folder, hf, family)
        return step if step.lora is None else AdaptedModel(step, family=family)
    if is_peft_folder(folder):
        try:
            return AdaptedModel(PeftFolder(folder), hf, family)
        except WeightsError as error:
            raise ConvertError(str(error)) from error
    if (folder / "config.json").exists():
        return HFFolder(folder, family)
    inside = " or ".join(repr(str(path)) for path in _models_in(folder))
    hint = f"; did you mean {inside}?" if inside else f" (no config.json, no {FORMAT_FILE})"
    raise ConvertError(f"{str(folder)!r} is neither a Hugging Face folder nor a Megatron-Core checkpoint{hint}")


def _models_in(folder: Path) -> list[Path]:
    """Lists the exported model of a run's output folder and its newest step; its supervised stages have steps too."""
    models = [folder / EXPORT_FOLDER] if (folder / EXPORT_FOLDER / "config.json").exists() else []
    for pattern in ("checkpoints/step_*", "**/step_*"):
        steps = sorted(step.parent.parent for step in folder.glob(f"{pattern}/state/{FORMAT_FILE}"))
        if steps := [step for step in steps if (step / STEP_FILE).exists()]:
            return [*models, steps[-1]]
    return models


def _part_hint(path: Path) -> str:
    """Returns a hint for the folder of a critic or a reward model that a checkpoint does not have."""
    step = path.parent
    if path.name not in PART_FOLDERS or not (step / STEP_FILE).exists():
        return ""
    existing = [step, *(step / name for name in PART_FOLDERS if (step / name).is_dir())]
    return f": its run saved no {path.name}; name {' or '.join(repr(str(folder)) for folder in existing)}"


def model_layout_problems(arch: Architecture, tp: int = 1, pp: int = 1, ep: int = 1) -> list[str]:
    """Returns the reasons why the model cannot be divided over such a layout."""
    problems = split_problems(arch, tp)
    if arch.num_layers % pp:
        problems.append(f"{arch.num_layers} layers over {pp} stages leave {arch.num_layers % pp}")
    if (arch.num_experts or 1) % ep:
        problems.append(f"{arch.num_experts} experts over {ep} ranks leave {arch.num_experts % ep}")
    if ep > 1 and not arch.num_experts:
        problems.append(f"ep {ep}: the model has no experts")
    return problems


def check_model_layout(arch: Architecture, tp: int, pp: int, ep: int) -> None:
    """Raise ConvertError, with the sizes that are possible, unless the model can be divided over this layout."""
    if problems := model_layout_problems(arch, tp, pp, ep):
        raise ConvertError(f"{'; '.join(problems)} (tp can be {fitting_sizes(arch, split_problems)})")


# -- The files that are copied with the weights: tokenizer, chat template, generation config, licence ------------------

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx", ".distcp", ".npz"}
CODE = {".py", ".pyc", ".so", ".sh"}  # never copied: a loader with trust_remote_code would run it
WRITTEN_ANEW = {"config.json", ADAPTER_CONFIG, MANIFEST_FILE, STEP_FILE, FORMAT_FILE}


def companions(folder: Path) -> list[Path]:
    """Returns the files that are neither weights nor code. config.json is not among them: its dtype may change."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
    files += sorted((folder / "chat_templates").glob("*.jinja"))  # where transformers puts named templates
    copied = (p for p in files if p.suffix not in WEIGHTS | CODE and p.name not in WRITTEN_ANEW)
    return [p for p in copied if not p.name.endswith(".index.json")]
