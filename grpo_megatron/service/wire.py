"""The messages of the `tinker` protocol, version 0.38 of the client: protobuf in one direction of training, JSON elsewhere.

The fields and their numbers are those of the client's tinker_public.proto. They are built here, so that the server needs
no client, in a pool of their own, so that a process may have both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, create_model
from pydantic_core import from_json

from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.service.losses import DEFAULTS, NEEDED

PROTOBUF = "application/x-protobuf"
MESSAGES = """
SparseCsr values=1:bytes
Tensor dense=1:bytes sparse_csr=2:SparseCsr dtype=3:int32 shape=4:*int64
EncodedTextChunk tokens=1:bytes
Chunk encoded_text=1:EncodedTextChunk
Datum model_input=1:*Chunk loss_fn_inputs=2:{Tensor}
LossConfigValue number=1:double text=2:string
ForwardBackwardRequest model_id=1:string seq_id=2:int32 data=3:*Datum loss_fn=4:string forward_only=6:bool \
loss_fn_config_v2=7:{LossConfigValue}
BatchedTensor data=1:bytes offsets=2:bytes dtype=3:int32 trailing_shape=4:*int64
ArrayRecord type_tag=1:string fields=2:{BatchedTensor} num_datums=3:int64
ForwardBackwardOutput loss_fn_output_type=1:string loss_fn_outputs=2:*ArrayRecord metrics=3:{double}
SampledSequence stop_reason=1:int32 tokens=2:bytes logprobs=3:bytes
SampleResponse sequences=1:*SampledSequence prompt_logprobs=2:bytes
"""  # *: repeated; {}: a map from text. An enum is an int32 on the wire; a oneof is its fields; others are skipped
FLOAT32, INT64 = 1, 2  # of DType
NUMPY: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8")}
MAX_FLOAT32 = float(np.finfo(np.float32).max)
STOP, LENGTH = 0, 1  # of StopReason
MAX_ERRORS = 1000  # of one JSON request, that are read


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="service.proto", package="service", syntax="proto3")
    scalar = {"bytes": 12, "string": 9, "double": 1, "bool": 8, "int32": 5, "int64": 3}

    def add(message: Any, name: str, number: int, kind: str) -> None:
        inner = kind.strip("*{}")
        field = message.field.add(name=name, number=number, label=1 if inner == kind else 3, type=scalar.get(inner, 11))
        if kind[0] == "{":
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            add(entry, "key", 1, "string")
            add(entry, "value", 2, inner)
            field.type, field.type_name = 11, f".service.{message.name}.{entry.name}"
        elif inner not in scalar:
            field.type_name = f".service.{inner}"

    for line in MESSAGES.strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for label, number, kind in (text.replace("=", ":").split(":") for text in fields):
            add(message, label, int(number), kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"service.{name}")) for name in names}


MESSAGE_CLASSES = _message_classes()


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
    message = MESSAGE_CLASSES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {str(error)[:200]}") from None
    loss = message.loss_fn
    if loss not in DEFAULTS:
        reason = {
            "custom": "the client computes custom losses itself, from a forward pass (custom_loss_server_side=false)",
            "stable_reinforce": "what the sampler recorded of each sequence is not kept; use importance_sampling, cispo or gspo",
        }.get(loss, f"known: {', '.join(DEFAULTS)}")
        raise RequestError(f"loss_fn {loss[:100]!r} is not served: {reason}")
    settings = dict(DEFAULTS[loss])
    for name, value in message.loss_fn_config_v2.items():
        if name not in settings or value.text or not abs(value.number) <= MAX_FLOAT32:
            given = value.text[:100] or value.number
            raise RequestError(
                f"loss_fn_config {name[:100]!r}={given!r}: {loss} has {settings or 'no settings'}, finite in float32"
            )
        settings[name] = value.number
    if settings.get("clip_low_threshold", 0) > settings.get("clip_high_threshold", 1):
        raise RequestError(f"clip_low_threshold {settings['clip_low_threshold']} is above clip_high_threshold")
    if not message.data:
        raise RequestError("data is empty; send at least one datum")
    data = [_read_datum(number, datum, loss, vocab_size, max_tokens) for number, datum in enumerate(message.data)]
    return PassRequest(message.model_id, message.seq_id, data, loss, settings, message.forward_only)


def place_of(path: str, body: bytes) -> tuple[str, int] | None:
    """Returns model_id and seq_id of a request, also of one that is wrong otherwise. None: it has none, or cannot be read."""
    if path == "forward_backward":
        message = MESSAGE_CLASSES["ForwardBackwardRequest"]()
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
        if not chunk.HasField("encoded_text") or len(chunk.encoded_text.tokens) % 4:
            raise RequestError(
                f"datum {number}: model_input has a chunk that is no text (images and audio are not served)"
            )
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts or [np.empty(0, "<i4")]).astype(np.int64)
    check_tokens(f"datum {number}: model_input", tokens, vocab_size, max_tokens)
    inputs: Mapping[str, Any] = datum.loss_fn_inputs
    for name in ("target_tokens", *NEEDED[loss]):
        if name not in inputs and name not in ("weights", "sequence_ratio_mask"):
            raise RequestError(
                f"datum {number}: {loss} needs loss_fn_inputs {name!r};"
                f" given: {', '.join(sorted(inputs))[:200] or 'none'}"
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
    if tensor.HasField("sparse_csr") or len(shape) > 1:
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
    message = MESSAGE_CLASSES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
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
    message = MESSAGE_CLASSES["SampleResponse"]()
    for tokens, logprobs, reason in sequences:
        part = message.sequences.add(stop_reason=STOP if reason == "stop" else LENGTH)
        part.tokens = np.asarray(tokens, "<i4").tobytes()
        part.logprobs = np.asarray(logprobs, "<f4").tobytes()
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    return bytes(message.SerializeToString())


@dataclass(frozen=True)
class SampleJob:
    """One sampling request: as many responses as `seeds`, and log-probabilities of the prompt's last `num_scored` tokens."""

    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    num_scored: int | None


def read_sample(request: Any, vocab_size: int, max_tokens: int, place: Sequence[Any]) -> SampleJob:
    """Checks a SampleRequest. Its seeds follow from `place`, its own seed, the prompt and their index. Raises RequestError."""
    prompt = np.asarray([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int64)
    settings, last = request.sampling_params, request.prompt_logprobs_last_n
    check_tokens("prompt", prompt, vocab_size, max_tokens - 1)
    if last is not None and last >= len(prompt):
        raise RequestError(f"prompt_logprobs_last_n={last} of a prompt of {len(prompt)} tokens")
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or ()
    if "" in stop or len(stop) > 64:
        raise RequestError("stop: at most 64 ids or texts, none empty; the model's end tokens always end a response")
    base = [*place, settings.seed, prompt.tolist()]
    return SampleJob(
        prompt=tuple(prompt.tolist()),
        seeds=tuple(stable_hash(json.dumps([*base, index])) for index in range(request.num_samples)),
        max_tokens=min(settings.max_tokens or max_tokens, max_tokens - len(prompt)),
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k or -1,
        stop_token_ids=tuple(one for one in stop if isinstance(one, int)),
        stop=tuple(one for one in stop if isinstance(one, str)),
        num_scored=(last or len(prompt) - 1) if request.prompt_logprobs else None,
    )


# -- JSON requests: the protocol's fields. One with a single value, or None, is a field that is not served ---------------


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    type: str = ""


def _request(name: str, **fields: Any) -> Any:
    """Makes a model of fields: a type, or a type with a default."""
    whole: dict[str, Any] = {key: one if isinstance(one, tuple) else (one, ...) for key, one in fields.items()}
    return create_model(name, __base__=_Request, **whole)


def _checked_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name) is None:
        raise ValueError("a name is 1 to 128 letters, digits, '_', '.' and '-', and does not begin with '.' or '-'")
    return name


def _checked_metadata(content: dict[str, Any]) -> dict[str, Any]:
    json.dumps(content, allow_nan=False)  # ValueError: else no answer could have it
    return content


Id = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Name = Annotated[str, AfterValidator(_checked_name)]
Seq = Annotated[int, Field(ge=0, le=2**62)]
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Metadata = Annotated[dict[str, Any], AfterValidator(_checked_metadata)] | None
Ttl = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]  # seconds
Rate = Annotated[float, Field(ge=0, lt=1)]
OptimizerKind = _request("OptimizerKind", type=(Literal["adamw"], "adamw"))
LoraRequest = _request(
    "LoraRequest",
    rank=Annotated[int, Field(ge=0)],
    seed=(Annotated[int, Field(ge=0, lt=2**63)] | None, None),
    train_unembed=(bool, True),
    train_mlp=(bool, True),
    train_attn=(bool, True),
)
AdamSettings = _request(
    "AdamSettings",
    learning_rate=(Annotated[float, Field(ge=0, le=100)], 1e-4),
    beta1=(Rate, 0.9),
    beta2=(Rate, 0.95),
    eps=(Annotated[float, Field(gt=0, le=1)], 1e-12),
    weight_decay=(Annotated[float, Field(ge=0, le=1000)], 0.0),
    grad_clip_norm=(Annotated[float, Field(ge=0)], 0.0),  # 0: no clipping
)
CreateSession = _request(
    "CreateSession",
    tags=(list[str], []),
    user_metadata=(Metadata, None),
    sdk_version=(str, ""),
    project_id=(str | None, None),
    display_name=(str | None, None),
)
OfSession = _request("OfSession", session_id=Id)
OfModel = _request("OfModel", model_id=Id)
CreateModel = _request(
    "CreateModel",
    session_id=Id,
    model_seq_id=Seq,
    base_model=Id,
    user_metadata=(Metadata, None),
    lora_config=(LoraRequest | None, None),
    optimizer_config=(OptimizerKind, OptimizerKind()),
)
OptimStep = _request("OptimStep", adam_params=AdamSettings, model_id=Id, seq_id=Seq)
SaveWeights = _request(
    "SaveWeights",
    model_id=Id,
    path=(Name | None, None),  # None: for a sampling session
    seq_id=Seq,
    sampling_session_seq_id=(Seq | None, None),
    kind=(Literal["snapshot"], "snapshot"),
    ttl_seconds=(Ttl | None, None),
    overwrite=(bool, False),
    user_metadata=(Metadata, None),
    age_encryption_recipients=(None, None),
)
LoadWeights = _request(
    "LoadWeights",
    # with seq_id: into a model; session_id with model_seq_id: the first request of a new one
    model_id=(Id | None, None),
    seq_id=(Seq | None, None),
    session_id=(Id | None, None),
    model_seq_id=(Seq | None, None),
    base_model=(Id | None, None),
    user_metadata=(Metadata, None),
    path=Id,
    optimizer=bool,
    optimizer_config=(OptimizerKind | None, None),
    weights_access_token=(None, None),
)
CreateSampler = _request(
    "CreateSampler",
    session_id=Id,
    sampling_session_seq_id=Seq,
    base_model=(Id | None, None),
    model_path=(Id | None, None),
)
TextChunk = _request("TextChunk", tokens=list[TokenId], type=(Literal["encoded_text"], "encoded_text"))
SamplingSettings = _request(
    "SamplingSettings",
    max_tokens=(Annotated[int, Field(ge=1)] | None, None),
    seed=(Annotated[int, Field(ge=-(2**63), lt=2**63)] | None, None),
    stop=(str | list[str] | list[TokenId] | None, None),
    temperature=(Annotated[float, Field(ge=0, le=100)], 1.0),
    top_k=(Annotated[int, Field(ge=-1)], -1),
    top_p=(Annotated[float, Field(gt=0, le=1)], 1.0),
)
SampleRequest = _request(
    "SampleRequest",
    num_samples=(Annotated[int, Field(ge=1, le=4096)], 1),
    prompt=_request("Prompt", chunks=list[TextChunk]),  # type: ignore[valid-type]
    sampling_params=SamplingSettings,
    sampling_session_id=Id,
    seq_id=Seq,
    prompt_logprobs=(bool | None, None),
    prompt_logprobs_last_n=(Annotated[int, Field(ge=1)] | None, None),
    topk_prompt_logprobs=(Literal[0], 0),
    topk_sample_logprobs=(Literal[0], 0),
    prompt_alt_tokens_k=(Literal[0], 0),
    target_prompt_logprobs=(None, None),
    record_stability_info=(bool | None, None),  # without an effect: the loss that reads it is refused
    base_model=(None, None),
    model_path=(None, None),
)
SAVES = {  # path of a request -> kind of a checkpoint
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
Retrieve = _request("Retrieve", request_id=Id, allow_metadata_only=(bool, False))


def _in_words(error: Any) -> str:
    if error["type"] in ("literal_error", "none_required"):
        return f"{error['msg'].replace('Input should be', 'only')} is served (docs/service.md)"
    return "is not served (docs/service.md)" if error["type"] == "extra_forbidden" else str(error["msg"])


def read_json_request(kind: Any, body: bytes) -> Any:
    """Reads a request of one of the kinds above. Raises RequestError, which names the wrong fields."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > MAX_ERRORS:  # each is 1 kB of Python
            raise RequestError(f"{count} fields are wrong") from None
        places = [(".".join(map(str, one["loc"]))[:200], _in_words(one)[:300]) for one in error.errors()[:8]]
        wrong = [f"{place}: {text}".removeprefix(": ").replace("Value error, ", "") for place, text in places]
        raise RequestError("; ".join(wrong)) from None


def read_request(body: bytes, vocab_size: int, max_tokens: int) -> tuple[str, Any]:
    """Reads a request of a model, whose first line is its path. Returns its kind and content. Raises RequestError."""
    line, _, content = body.partition(b"\n")
    path = line.decode()
    if path == "forward_backward":
        return "pass", read_pass(content, vocab_size, max_tokens)
    if path == "optim_step":
        return "step", read_json_request(OptimStep, content)
    if path not in SAVES:
        return "load", read_json_request(LoadWeights, content)
    request = read_json_request(SaveWeights, content)
    if request.path is None and path != "save_weights_for_sampler":
        raise RequestError("path: a checkpoint needs a name")
    return SAVES[path], request
