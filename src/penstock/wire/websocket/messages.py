"""The JSON messages of the WebSocket protocol, to the letter of its description.

`req_id` is echoed as it came, whatever JSON it is. `message_payload` is text; with `"encoding":
"base64"` it is bytes.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

ReqId = Raw | UnsetType


class Produce(Struct, tag_field="command", tag="produce_request"):
    topic: str
    message_payload: str
    encoding: str | UnsetType = UNSET
    req_id: ReqId = UNSET


class Subscribe(Struct, tag_field="command", tag="subscribe_topic_request"):
    topic: str
    start_offset: int | Literal["earliest", "latest"] = 0
    req_id: ReqId = UNSET


class Unsubscribe(Struct, tag_field="command", tag="unsubscribe_topic_request"):
    topic: str
    req_id: ReqId = UNSET


class Create(Struct, tag_field="command", tag="create_topic_request"):
    topic: str
    req_id: ReqId = UNSET


class ListTopics(Struct, tag_field="command", tag="list_topics_request"):
    req_id: ReqId = UNSET


class GetNextOffset(Struct, tag_field="command", tag="get_next_offset_request"):
    topic: str
    req_id: ReqId = UNSET


Request = Produce | Subscribe | Unsubscribe | Create | ListTopics | GetNextOffset
COMMANDS = {kind: str(kind.__struct_config__.tag) for kind in Request.__args__}


class Envelope(Struct):
    """What can still be read of a request that is not understood."""

    command: Any = UNSET
    req_id: ReqId = UNSET


class Produced(Struct):
    command: str
    req_id: ReqId
    topic: str
    offset: int
    success: bool = True


class TopicDone(Struct):
    """The answer to subscribe, unsubscribe and create."""

    command: str
    req_id: ReqId
    topic: str
    success: bool = True


class Listed(Struct):
    command: str
    req_id: ReqId
    topics: list[str]
    success: bool = True


class NextOffset(Struct):
    command: str
    req_id: ReqId
    topic: str
    next_offset: int
    success: bool = True


class Failed(Struct):
    command: str
    req_id: ReqId
    error_message: str
    original_command_type: str | UnsetType = UNSET
    # as in `penstock.protocol.status.Details`
    code: str | UnsetType = UNSET
    retry_after: float | UnsetType = msgspec.field(default=UNSET, name="retryAfter")
    resume: int | UnsetType = UNSET


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Request).decode
decode_envelope = msgspec.json.Decoder(Envelope).decode
