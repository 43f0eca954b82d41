"""The one vocabulary of strategies and clients: typed requests and replies, to and from a RecordDict.

A message holds one ConfigRecord (``fields``), at most one ArrayRecord (``arrays``, few and large, since each
array costs HTTP requests) and at most one MetricRecord (``metrics``).
"""

from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from .config import RunConfig
from .errors import DeviceError, PayloadError

SCHEMA = 1
MAX_SAMPLES = 10_000_000
MAX_LABELS = 10_000
MAX_LABEL_LENGTH = 256
PROFILE = "query.profile"
HEAD = "query.head"
ACTIVATIONS = "train.activations"
EVALUATE = "evaluate.side_tuned"

Bytes = NDArray[np.uint8]
Digest = Annotated[bytes, Field(min_length=16, max_length=16)]
Tenant = Annotated[str, Field(max_length=128, pattern=r"^(device|node)-[A-Za-z0-9]+$")]
LabelName = Annotated[str, Field(max_length=MAX_LABEL_LENGTH)]
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.\-]+$")]


def _is_bytes_array(value: Any) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError("expected a one-dimensional uint8 array")
    return value


PackedBytes = Annotated[Bytes, BeforeValidator(_is_bytes_array)]
Metrics = dict[str, float]
R = TypeVar("R")


class Envelope(BaseModel):
    """Base of all requests and replies."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    array_fields: ClassVar[tuple[str, ...]] = ()
    metric_field: ClassVar[str | None] = None

    def to_records(self) -> RecordDict:
        """The content of a Flower message."""
        apart = {*self.array_fields, self.metric_field}
        fields: dict[str, Any] = {"schema": SCHEMA, "kind": type(self).__name__}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name in apart:
                continue
            if isinstance(value, RunConfig):
                fields |= {f"config.{key}": item for key, item in value.model_dump(by_alias=True).items()}
            else:
                fields[name] = list(value) if isinstance(value, tuple) else value
        records = RecordDict({"fields": ConfigRecord(fields)})
        if self.array_fields:
            records["arrays"] = ArrayRecord({name: Array(getattr(self, name)) for name in self.array_fields})
        if self.metric_field is not None:
            records["metrics"] = MetricRecord(getattr(self, self.metric_field))
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> Self:
        """Read and check the content of a Flower message.

        Raises
        ------
        PayloadError
            The message is of another kind or version, or a field is missing or of the wrong type.
        DeviceError
            The message is a device's report that it failed.
        """
        fields = dict(_record(records, "fields", ConfigRecord, cls.__name__))
        kind, schema = fields.pop("kind", None), fields.pop("schema", None)
        if kind == Failure.__name__ and cls is not Failure:
            raise DeviceError(str(fields.get("reason", "no reason given")))
        if kind != cls.__name__ or schema != SCHEMA:
            raise PayloadError(
                f"expected {cls.__name__} of message version {SCHEMA}, got {kind!r} of version {schema!r};"
                " install the same flower-plugin on the server and on every device"
            )
        values: dict[str, Any] = {key: value for key, value in fields.items() if not key.startswith("config.")}
        config = {key.removeprefix("config."): item for key, item in fields.items() if key.startswith("config.")}
        if config:
            values["config"] = config
        if cls.array_fields:
            arrays = _record(records, "arrays", ArrayRecord, cls.__name__)
            values |= {name: _numpy(arrays, name) for name in cls.array_fields}
        if cls.metric_field is not None:
            values[cls.metric_field] = dict(_record(records, "metrics", MetricRecord, cls.__name__))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise PayloadError(f"{cls.__name__} does not hold what it must: {problems}") from None


def _record(records: RecordDict, name: str, kind: type[R], message: str) -> R:
    record = records.get(name)
    if not isinstance(record, kind):
        raise PayloadError(f"{message} has no {kind.__name__} named {name!r}")
    return record


def _numpy(arrays: ArrayRecord, name: str) -> Any:
    if name not in arrays:
        raise PayloadError(f"the array {name!r} is missing")
    try:
        return arrays[name].numpy()
    except Exception as error:  # np.load raises many kinds on hostile bytes
        raise PayloadError(f"the array {name!r} cannot be read: {error}") from error


class Failure(Envelope):
    """A device's report that it could not do what was asked, and why."""

    reason: str


class ProfileRequest(Envelope):
    """Ask a device what it has: its backbone, its samples (by digest), its classes."""

    config: RunConfig


class Profile(Envelope):
    """What a device has. Counts are of samples; ``digests`` are of its training samples, in its order."""

    tenant: Tenant
    order: int = Field(ge=0, le=MAX_SAMPLES)
    plugin_version: str
    fingerprint: Identifier
    model_type: str
    num_blocks: int = Field(ge=1, le=10_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    vocab_size: int = Field(ge=0, le=100_000_000)
    template: Identifier
    digests: tuple[Digest, ...] = Field(max_length=MAX_SAMPLES)
    num_test: int = Field(ge=0, le=MAX_SAMPLES)
    label_names: tuple[LabelName, ...] = Field(max_length=MAX_LABELS)
    truncated: int = Field(0, ge=0)
    unusable: int = Field(0, ge=0)
    duplicates: int = Field(0, ge=0)

    @field_validator("digests", "label_names")
    @classmethod
    def _each_once(cls, names: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(set(names)) != len(names):
            raise ValueError("an entry occurs twice")
        return names


class HeadRequest(Envelope):
    """Ask a device for the frozen head of its backbone."""

    config: RunConfig
    fingerprint: Identifier


class HeadReply(Envelope):
    """The head's tensors and config, packed."""

    head: PackedBytes
    array_fields: ClassVar[tuple[str, ...]] = ("head",)


class TapPlan(Envelope):
    """What is tapped, of which backbone, and how classes are numbered: the same for every device of a run."""

    fingerprint: Identifier
    taps: tuple[int, ...] = Field(min_length=1)
    label_names: tuple[str, ...]


class ActivationRequest(TapPlan):
    """Ask for the activations of the samples in ``wanted``, as many as the byte budget allows."""

    config: RunConfig
    wanted: tuple[Digest, ...]


class ActivationReply(Envelope):
    """One shift's activations. ``costs``: seconds, samples, tokens, forwarded tokens, peak bytes."""

    tenant: Tenant
    remaining: int = Field(ge=0)
    refused: tuple[Digest, ...]
    payload: PackedBytes
    index: PackedBytes
    costs: Metrics
    array_fields: ClassVar[tuple[str, ...]] = ("payload", "index")
    metric_field: ClassVar[str | None] = "costs"


class EvaluateRequest(TapPlan):
    """Ask for the quality of a side network on the device's own held-out samples."""

    config: RunConfig
    network: PackedBytes
    array_fields: ClassVar[tuple[str, ...]] = ("network",)


class EvaluateReply(Envelope):
    """``metrics``: num-examples (samples), tokens, loss (mean over tokens), accuracy, seconds, forwarded."""

    tenant: Tenant
    metrics: Metrics
    metric_field: ClassVar[str | None] = "metrics"


def instruction(request: Envelope, message_type: str, node_id: int, group: str, ttl: float | None = None) -> Message:
    """A Flower message that carries ``request`` to a node; ``ttl`` in seconds, its reply included."""
    return Message(request.to_records(), node_id, message_type, ttl=ttl, group_id=group)
