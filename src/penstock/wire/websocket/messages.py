"""The JSON messages of the WebSocket protocol, exactly as aiq defines them.

`req_id` may be any JSON and is returned unchanged. `message_payload` is text, or base64 with
`"encoding": "base64"`. `key`, `headers`, `timestamp` and a payload of null are as over HTTP
(`penstock.protocol.records`).
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.protocol.kafka_batch import NewRecord
from penstock.protocol.records import MessageFields, Text, payload_bytes

ReqId = Raw | UnsetType
Partition = Annotated[int, msgspec.Meta(ge=0)]


class WebsocketCommand(Struct, tag_field="command", kw_only=True):
    req_id: ReqId = UNSET


class ProduceCommand(WebsocketCommand, tag="produce_request"):
    topic: str
    message_payload: str | None
    encoding: str | UnsetType = UNSET
    key: Text | None = None
    headers: list[tuple[str, Text | None]] = []
    timestamp: int | None = None
    partition: Partition = 0

    def record(self) -> NewRecord:
        payload = None
        if self.message_payload is not None:
            payload = payload_bytes(self.message_payload, self.encoding)
        return MessageFields(self.key, self.headers, self.timestamp).record(payload)


class Subscribe(WebsocketCommand, tag="subscribe_topic_request"):
    topic: str
    start_offset: int | Literal["earliest", "latest"] = 0
    partition: Partition = 0


class Unsubscribe(WebsocketCommand, tag="unsubscribe_topic_request"):
    topic: str
    partition: Partition = 0


class Create(WebsocketCommand, tag="create_topic_request"):
    topic: str
    format: str | None = None
    partitions: Annotated[int, msgspec.Meta(ge=1)] = 1


class ListTopics(WebsocketCommand, tag="list_topics_request"):
    pass


class GetNextOffset(WebsocketCommand, tag="get_next_offset_request"):
    topic: str
    partition: Partition = 0


Request = ProduceCommand | Subscribe | Unsubscribe | Create | ListTopics | GetNextOffset
COMMANDS = {kind: str(kind.__struct_config__.tag) for kind in Request.__args__}


class CommandEnvelope(Struct):
    """The fields to read from an invalid request, for its error."""

    command: Any = UNSET
    req_id: ReqId = UNSET


class WebsocketAnswer(Struct):
    command: str
    req_id: ReqId


class Done(WebsocketAnswer, kw_only=True):
    """The answer to a successful request, with the fields of its command."""

    topic: str | UnsetType = UNSET
    offset: int | UnsetType = UNSET  # of the record
    topics: list[str] | UnsetType = UNSET
    next_offset: int | UnsetType = UNSET
    success: bool = True


class Failed(WebsocketAnswer):
    error_message: str
    original_command_type: str | UnsetType = UNSET
    # as in `penstock.protocol.status.Details`
    code: str | UnsetType = UNSET
    retry_after: float | UnsetType = msgspec.field(default=UNSET, name="retryAfter")
    resume: int | UnsetType = UNSET


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Request).decode
decode_envelope = msgspec.json.Decoder(CommandEnvelope).decode
