"""The messages of the `tinker` protocol, version 0.38 of the client: protobuf in one direction of training, JSON elsewhere.

The fields and their numbers are those of the client's tinker_public.proto. They are built here, so that the server needs
no client, in a pool of their own, so that a process may have both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import from_json

from grpo_megatron.service.losses import DEFAULTS, NEEDED

PROTOBUF = "application/x-protobuf"
MESSAGES = """
SparseCsr values=1:bytes crow_indices=2:bytes col_indices=3:bytes
Tensor dense=1:bytes:encoding sparse_csr=2:SparseCsr:encoding dtype=3:int32 shape=4:*int64
Chunk encoded_text=1:EncodedTextChunk:chunk image=2:EncodedTextChunk:chunk dmel=3:EncodedTextChunk:chunk
EncodedTextChunk tokens=1:bytes
ProvenanceSpan prompt_tokens=1:EncodedTextChunk sampled_tokens=2:EncodedTextChunk
Datum model_input=1:*Chunk loss_fn_inputs=2:{Tensor} model_input_spans=3:*ProvenanceSpan loss_fn_input_spans=4:*ProvenanceSpan
LossConfigValue number=1:double:value text=2:string:value
ForwardBackwardRequest model_id=1:string seq_id=2:int32 data=3:*Datum loss_fn=4:string loss_fn_config=5:{double} \
forward_only=6:bool loss_fn_config_v2=7:{LossConfigValue}
BatchedTensor data=1:bytes offsets=2:bytes dtype=3:int32 trailing_shape=4:*int64
ArrayRecord type_tag=1:string fields=2:{BatchedTensor} num_datums=3:int64
ForwardBackwardOutput loss_fn_output_type=1:string loss_fn_outputs=2:*ArrayRecord metrics=3:{double}
SampledSequence stop_reason=1:int32 tokens=2:bytes logprobs=3:bytes
SampleResponse sequences=1:*SampledSequence prompt_logprobs=2:bytes
"""  # *: repeated; {}: a map from text; the last part: a oneof. An enum is an int32 on the wire
FLOAT32, INT64 = 1, 2  # of DType
NUMPY = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
STOP, LENGTH = 0, 1  # of StopReason


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="service.proto", package="service", syntax="proto3")
    scalar = {"bytes": 12, "string": 9, "double": 1, "bool": 8, "int32": 5, "int64": 3}

    def add(message: Any, number: int, name: str, kind: str) -> Any:
        field = message.field.add(name=name, number=number, label=3 if kind[0] in "*{" else 1)
        kind = kind.strip("*{}")
        field.type = scalar.get(kind, 11)
        if kind not in scalar:
            field.type_name = f".service.{kind}"
        return field

    for line in MESSAGES.strip().replace("\\\n", "").splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        oneofs: list[str] = []
        for text in fields:
            label, _, rest = text.partition("=")
            number, kind, *oneof = rest.split(":")
            if kind.startswith("{"):
                entry = message.nested_type.add(name=f"{label.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                add(entry, 1, "key", "string")
                add(entry, 2, "value", kind.strip("{}"))
                field = message.field.add(name=label, number=int(number), label=3, type=11)
                field.type_name = f".service.{name}.{entry.name}"
                continue
            field = add(message, int(number), label, kind)
            if oneof:
                if oneof[0] not in oneofs:
                    oneofs.append(oneof[0])
                    message.oneof_decl.add(name=oneof[0])
                field.oneof_index = oneofs.index(oneof[0])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"service.{name}")) for name in names}


CLASSES = _message_classes()


class RequestError(ValueError):
    """A mistake of the client, with the status of the answer."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


# -- forward and forward_backward --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WireDatum:
    """One datum: N tokens of input, the N tokens that they are to predict, and the loss's float32 columns [N]."""

    tokens: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    columns: dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class PassRequest:
    """A forward pass over data, or with the gradients of `loss`. `settings`: of the loss, complete."""

    model_id: str
    seq_id: int
    data: list[WireDatum]
    loss: str
    settings: dict[str, float]
    forward_only: bool


def read_pass(body: bytes, vocab_size: int, max_tokens: int) -> PassRequest:
    """Reads and checks a ForwardBackwardRequest. Raises RequestError."""
    message = CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {str(error)[:200]}") from None
    loss = message.loss_fn
    if loss not in DEFAULTS:
        reason = {
            "custom": "the client computes custom losses itself, from a forward pass (client config custom_loss_server_side=false)",
            "stable_reinforce": "what the sampler recorded of each sequence is not kept; use importance_sampling, cispo or gspo",
        }.get(loss, f"known: {', '.join(DEFAULTS)}")
        raise RequestError(f"loss_fn {loss[:100]!r} is not served: {reason}")
    settings = dict(DEFAULTS[loss])
    given: dict[str, Any] = dict(message.loss_fn_config)
    given |= {
        name: getattr(value, value.WhichOneof("value") or "text") for name, value in message.loss_fn_config_v2.items()
    }
    for name, value in given.items():
        if name not in settings or not isinstance(value, float) or not math.isfinite(value):
            raise RequestError(
                f"loss_fn_config {name[:100]!r}={value!r}: {loss} has {settings or 'no settings'}, finite numbers"
            )
        settings[name] = value
    if settings.get("clip_low_threshold", 0) > settings.get("clip_high_threshold", 1):
        raise RequestError(f"clip_low_threshold {settings['clip_low_threshold']} is above clip_high_threshold")
    if not message.data:
        raise RequestError("data is empty; send at least one datum")
    data = [_read_datum(number, datum, loss, vocab_size, max_tokens) for number, datum in enumerate(message.data)]
    return PassRequest(message.model_id, message.seq_id, data, loss, settings, message.forward_only)


def place_of(path: str, body: bytes) -> tuple[str, int] | None:
    """Returns model_id and seq_id of a request, also of one that is wrong otherwise. None: it has none, or cannot be read."""
    if path == "forward_backward":
        message = CLASSES["ForwardBackwardRequest"]()
        try:
            message.ParseFromString(body)
        except (DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return message.model_id, message.seq_id
    try:
        content = from_json(body)
    except ValueError:
        return None
    model_id, seq_id = (
        (content.get(name) for name in ("model_id", "seq_id")) if isinstance(content, dict) else (None, None)
    )
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None


def _read_datum(number: int, datum: Any, loss: str, vocab_size: int, max_tokens: int) -> WireDatum:
    parts = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text" or len(chunk.encoded_text.tokens) % 4:
            raise RequestError(
                f"datum {number}: model_input has a chunk of {kind}; only text is served: whole int32 tokens"
            )
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts or [np.empty(0, "<i4")]).astype(np.int64)
    check_tokens(f"datum {number}: model_input", tokens, vocab_size, max_tokens)
    inputs: Mapping[str, Any] = datum.loss_fn_inputs
    for name in ("target_tokens", *NEEDED[loss]):
        if name not in inputs and name not in ("weights", "sequence_ratio_mask"):
            raise RequestError(
                f"datum {number}: {loss} needs loss_fn_inputs {name!r}; given: {', '.join(sorted(inputs))[:200]}"
            )
    if unknown := sorted({*inputs} - {"target_tokens", "weights", *NEEDED[loss]}):
        raise RequestError(
            f"datum {number}: {loss} does not read loss_fn_inputs {', '.join(unknown)[:200]}; leave them out"
        )
    columns = {name: _read_tensor(number, name, inputs[name], len(tokens)) for name in inputs}
    targets = columns.pop("target_tokens")
    if targets.dtype.kind != "i":
        raise RequestError(f"datum {number}: target_tokens are float32; send int64")
    check_tokens(f"datum {number}: target_tokens", targets, vocab_size, max_tokens)
    columns = {name: column.astype(np.float32) for name, column in columns.items() if name in NEEDED[loss]}
    for name in NEEDED[loss]:  # those that the client may leave out
        columns.setdefault(name, np.ones(len(tokens), np.float32))
    return WireDatum(tokens, targets, columns)


def _read_tensor(number: int, name: str, tensor: Any, size: int) -> np.ndarray[Any, Any]:
    kind, shape = NUMPY.get(tensor.dtype), list(tensor.shape)
    where = f"datum {number}: loss_fn_inputs {name[:100]!r}"
    if kind is None:
        raise RequestError(f"{where}: dtype {tensor.dtype} is neither float32 nor int64")
    if tensor.WhichOneof("encoding") != "dense" or len(shape) > 1:
        raise RequestError(
            f"{where} has the shape {shape[:4]}; served is one dense number for each of the {size} input tokens"
        )
    if len(tensor.dense) != size * kind.itemsize or shape not in ([], [size]):
        raise RequestError(
            f"{where} has {len(tensor.dense) // kind.itemsize} numbers, and model_input {size} tokens; send as many"
        )
    values = np.frombuffer(tensor.dense, kind)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise RequestError(f"{where} is not finite at position {int(np.argmin(np.isfinite(values)))}")
    return values


def check_tokens(where: str, tokens: np.ndarray[Any, Any], vocab_size: int, max_tokens: int) -> None:
    """Raises RequestError unless there are 1 to `max_tokens` ids of the vocabulary."""
    if not 1 <= len(tokens) <= max_tokens:
        raise RequestError(
            f"{where} has {len(tokens)} tokens; 1 to {max_tokens} are served (data.max_prompt_length + max_response_length)"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise RequestError(f"{where} has the id {int(wrong)}; the vocabulary has 0 to {vocab_size - 1}")


def pass_response(logprobs: Sequence[np.ndarray[Any, Any]], metrics: Mapping[str, float]) -> bytes:
    """Writes a ForwardBackwardOutput: float32 log-probabilities [N] of each datum. Names of metrics end in :sum or :mean."""
    message = CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.dtype, field.data = FLOAT32, b"".join(part.astype("<f4").tobytes() for part in logprobs)
    field.offsets = np.cumsum([0, *(4 * len(part) for part in logprobs)]).astype("<i8").tobytes()
    message.metrics.update(metrics)
    return bytes(message.SerializeToString())


def sample_response(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], str]], prompt_logprobs: Sequence[float] | None
) -> bytes:
    """Writes a SampleResponse of (tokens, log-probabilities, "stop" or "length") for each sequence."""
    message = CLASSES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        part = message.sequences.add(stop_reason=STOP if reason == "stop" else LENGTH)
        part.tokens = np.asarray(tokens, "<i4").tobytes()
        part.logprobs = np.asarray(logprobs, "<f4").tobytes()
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(message.SerializeToString())


# -- JSON requests -----------------------------------------------------------------------------------------------------

Id = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]
Seq = Annotated[int, Field(ge=0, le=2**62)]
Metadata = dict[Annotated[str, StringConstraints(max_length=200)], Any]
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    type: str = ""


class CreateSession(_Request):
    """POST create_session."""

    tags: list[str] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: Annotated[str, StringConstraints(max_length=500)] | None = None


class OfSession(_Request):
    """POST session_heartbeat."""

    session_id: Id


class LoraRequest(_Request):
    """The adapters of a model."""

    rank: int = Field(ge=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerKind(_Request):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(_Request):
    """POST create_model."""

    session_id: Id
    model_seq_id: Seq
    base_model: Id
    user_metadata: Metadata | None = None
    lora_config: LoraRequest | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class OfModel(_Request):
    """POST get_info, unload_model."""

    model_id: Id


class AdamSettings(_Request):
    """AdamW of one step. grad_clip_norm 0: no clipping."""

    learning_rate: float = Field(1e-4, ge=0, le=100)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, gt=0, le=1)
    weight_decay: float = Field(0.0, ge=0, le=1000)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(_Request):
    """POST optim_step."""

    adam_params: AdamSettings
    model_id: Id
    seq_id: Seq


class SaveWeights(_Request):
    """POST save_weights, save_weights_for_sampler and save_weights_external. Without `path`: for a sampling session."""

    model_id: Id
    path: Name | None = None
    seq_id: Seq
    sampling_session_seq_id: Seq | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None
    age_encryption_recipients: None = None


class LoadWeights(_Request):
    """POST load_weights: into a model, or as the first request of a new one."""

    model_id: Id | None = None
    seq_id: Seq | None = None
    session_id: Id | None = None
    model_seq_id: Seq | None = None
    base_model: Id | None = None
    user_metadata: Metadata | None = None
    path: Id
    optimizer: bool
    optimizer_config: OptimizerKind | None = None
    weights_access_token: None = None


class CreateSampler(_Request):
    """POST create_sampling_session."""

    session_id: Id
    sampling_session_seq_id: Seq
    base_model: Id | None = None
    model_path: Id | None = None


class TextChunk(_Request):
    """Tokens of a prompt."""

    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class Prompt(_Request):
    """A prompt of text."""

    chunks: list[TextChunk]


class SamplingSettings(_Request):
    """One request's sampling. `stop`: texts, or token ids."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | list[int] | None = None
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(_Request):
    """POST asample. Fields with one value are the protocol's that are not served."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: SamplingSettings
    sampling_session_id: Id
    seq_id: Seq
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: bool | None = None  # without an effect: the loss that reads it is refused
    base_model: None = None
    model_path: None = None


class Retrieve(_Request):
    """POST retrieve_future, cancel_future."""

    request_id: Id
    allow_metadata_only: bool = False


class OfPath(_Request):
    """POST weights_info."""

    tinker_path: Id
