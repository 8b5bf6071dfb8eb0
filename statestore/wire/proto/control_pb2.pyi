from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoReply(_message.Message):
    __slots__ = ("flight_address", "folder", "store_id", "lane_address", "lane_local_name")
    FLIGHT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LANE_LOCAL_NAME_FIELD_NUMBER: _ClassVar[int]
    flight_address: str
    folder: str
    store_id: str
    lane_address: str
    lane_local_name: str
    def __init__(self, flight_address: _Optional[str] = ..., folder: _Optional[str] = ..., store_id: _Optional[str] = ..., lane_address: _Optional[str] = ..., lane_local_name: _Optional[str] = ...) -> None: ...

class ListTablesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTablesReply(_message.Message):
    __slots__ = ("schema_json",)
    SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    schema_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema_json: _Optional[_Iterable[str]] = ...) -> None: ...

class ListQueuesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListQueuesReply(_message.Message):
    __slots__ = ("schema_json",)
    SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    schema_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, schema_json: _Optional[_Iterable[str]] = ...) -> None: ...

class CreateTableRequest(_message.Message):
    __slots__ = ("schema_json", "if_not_exists")
    SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    IF_NOT_EXISTS_FIELD_NUMBER: _ClassVar[int]
    schema_json: str
    if_not_exists: bool
    def __init__(self, schema_json: _Optional[str] = ..., if_not_exists: _Optional[bool] = ...) -> None: ...

class CreateQueueRequest(_message.Message):
    __slots__ = ("schema_json", "if_not_exists")
    SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    IF_NOT_EXISTS_FIELD_NUMBER: _ClassVar[int]
    schema_json: str
    if_not_exists: bool
    def __init__(self, schema_json: _Optional[str] = ..., if_not_exists: _Optional[bool] = ...) -> None: ...

class DropRequest(_message.Message):
    __slots__ = ("kind", "name")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChangeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("ttl_ms",)
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ttl_ms: int
    def __init__(self, ttl_ms: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("group", "member", "attributes", "ttl_ms")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    member: str
    attributes: _containers.ScalarMap[str, str]
    ttl_ms: int
    def __init__(self, group: _Optional[str] = ..., member: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("group", "revision", "wait_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    revision: int
    wait_ms: int
    def __init__(self, group: _Optional[str] = ..., revision: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("name", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MembersReply(_message.Message):
    __slots__ = ("revision", "members")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, revision: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class GroupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupsReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("stats_json",)
    STATS_JSON_FIELD_NUMBER: _ClassVar[int]
    stats_json: str
    def __init__(self, stats_json: _Optional[str] = ...) -> None: ...

class FlightAction(_message.Message):
    __slots__ = ("type", "body")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    type: str
    body: bytes
    def __init__(self, type: _Optional[str] = ..., body: _Optional[bytes] = ...) -> None: ...

class FlightResult(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    def __init__(self, body: _Optional[bytes] = ...) -> None: ...
