"""Group requests: members (`penstock.topics.assigned_groups`) and committed offsets
(`penstock.topics.groups`, which our own protocols share).
"""

from collections.abc import Mapping
from typing import Any

from kio.schema.errors import ErrorCode as Code

from penstock.errors import InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.protocol.names import check_name, partition_label, split_label
from penstock.protocol.roles import Role
from penstock.topics.assigned_groups import Joining, MemberRefused, Membership, Refusal
from penstock.topics.shared.groups import NotCoordinator
from penstock.topics.shared.log import SharedLog
from penstock.wire.kafka.codec import Values
from penstock.wire.kafka.connection import KafkaConnection, KafkaRequest
from penstock.wire.kafka.errors import Refused, code_of, each_partition, with_code
from penstock.wire.kafka.node import KafkaHandlers

GROUP_KEY = 0  # asks for a group's coordinator; 1 asks for a transaction's
MAX_NOTE = 4096  # bytes of metadata in a commit, as in Kafka


class GroupRequests(KafkaHandlers):
    @with_code
    async def find_coordinator(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        """Name the broker in the group's database row, as long as that broker is alive."""
        if getattr(request.body, "key_type", GROUP_KEY) != GROUP_KEY:
            raise InvalidRequest("transactions are not supported")
        coordinator, _ = await self._coordinator(request.body.key)
        return self._node.describe_one(connection, coordinator)

    async def _coordinator(self, group: str) -> tuple[int, int | None]:
        """Return the node that coordinates a group, and its epoch.

        This broker proposes itself if the group has committed on its local topics, and coordinates
        every group while the database is unavailable.
        """
        nodes = self._node.nodes
        if nodes is None or not self._topics.has_shared:
            return self._node.id, None
        own = nodes.own
        suggested = own if group in self._groups.names() else nodes.suggest(group)
        try:
            return await nodes.coordinator(group, suggested)
        except Unavailable:
            return own, None

    async def _check_coordinator(self, group: str) -> int | None:
        """Return this broker's epoch as coordinator. Refuse if another broker coordinates."""
        coordinator, epoch = await self._coordinator(group)
        if coordinator != self._node.id:
            self._groups.assigned.drop(group)
            raise NotCoordinator(f"broker {coordinator} coordinates group {group!r}")
        return epoch

    # Members

    @with_code
    async def join_group(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        session = body.session_timeout / 1000
        rebalance = getattr(body, "rebalance_timeout", body.session_timeout) / 1000
        joining = Joining(
            body.member_id,
            getattr(body, "group_instance_id", None),
            request.client,
            connection.host,
            session,
            rebalance if rebalance > 0 else session,
            body.protocol_type,
            {one.name: one.metadata for one in body.protocols},
            needs_id=request.head.version >= 4,
        )
        self._check(connection, body.group_id)
        await self._check_coordinator(body.group_id)
        joined = await self._groups.assigned.join(body.group_id, joining)
        return {
            "generation_id": joined.generation,
            "protocol_type": joined.kind,
            "protocol_name": joined.protocol,
            "leader": joined.leader,
            "member_id": joined.member,
            "members": [
                {"member_id": member, "group_instance_id": instance, "metadata": metadata}
                for member, instance, metadata in joined.members
            ],
        }

    @with_code
    async def sync_group(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        self._check(connection, body.group_id)
        assignments = {one.member_id: one.assignment for one in body.assignments}
        kind, protocol, assignment = await self._groups.assigned.sync(
            body.group_id, _membership(body), assignments
        )
        return {"protocol_type": kind, "protocol_name": protocol, "assignment": assignment}

    @with_code
    async def heartbeat(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        self._check(connection, request.body.group_id)
        self._groups.assigned.heartbeat(request.body.group_id, _membership(request.body))
        return {}

    def leave_group(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        members = getattr(body, "members", None)
        answers = []
        for one in (body,) if members is None else members:
            instance = getattr(one, "group_instance_id", None)
            answer = {"member_id": one.member_id, "group_instance_id": instance}
            try:
                self._check(connection, body.group_id)
                self._groups.assigned.leave(body.group_id, one.member_id, instance)
            except PenstockError as error:
                answer["error_code"] = code_of(error)
            answers.append(answer)
        code = answers[0].get("error_code", Code.none) if members is None else Code.none
        return {"error_code": code, "members": answers}

    def _check(self, connection: KafkaConnection, group: str) -> None:
        self._require(connection, Role.READ_WRITE)
        try:
            check_name(group, "group")
        except InvalidRequest as error:
            raise Refused(Code.invalid_group_id, str(error)) from None

    def _require(self, connection: KafkaConnection, role: Role) -> None:
        self._access.require(connection, role, Code.group_authorization_failed)

    # Committed offsets

    async def offset_commit(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        refused, changed = Code.none, False
        epoch: int | None = None
        shared: list[tuple[SharedLog, int, str]] = []
        try:
            self._check(connection, body.group_id)
            epoch = await self._check_coordinator(body.group_id)
            if self._groups.is_leased(body.group_id):
                raise MemberRefused(Refusal.INCONSISTENT_GROUP_PROTOCOL)
            who = Membership(
                body.member_id,
                body.generation_id_or_member_epoch,
                getattr(body, "group_instance_id", None),
            )
            self._groups.assigned.check_commit(body.group_id, who)
        except PenstockError as error:
            refused = code_of(error)

        async def commit(name: str, one: Any) -> dict[str, Any]:
            nonlocal changed
            code: int = refused
            if not refused:
                before = len(shared)
                code = self._commit(body.group_id, name, one, shared)
                changed = changed or (not code and len(shared) == before)
            return {"error_code": code}

        topics = await each_partition(body.topics, commit)
        if changed or shared:
            try:
                if changed:
                    await self._groups.flush()
                if shared and self._groups.shared is not None:
                    coordinator = None if epoch is None else (self._node.id, epoch)
                    done = await self._groups.shared.commit(body.group_id, shared, coordinator)
                    for topic in topics:
                        for answer in topic["partitions"]:
                            label = partition_label(topic["name"], answer["partition_index"])
                            if label not in done and self._topics.is_shared(label):
                                answer["error_code"] = Code.offset_out_of_range
            except PenstockError as error:
                for topic in topics:
                    for answer in topic["partitions"]:
                        answer["error_code"] = answer["error_code"] or code_of(error)
        return {"topics": topics}

    def _commit(
        self, group: str, topic: str, one: Any, shared: list[tuple[SharedLog, int, str]]
    ) -> int:
        """Set the offset of a local topic, or add that of a shared topic to `shared`."""
        note = one.committed_metadata or ""
        if len(note.encode()) > MAX_NOTE:
            return Code.offset_metadata_too_large
        try:
            log = self._topics.partition(topic, one.partition_index)
            if isinstance(log, SharedLog):
                shared.append((log, one.committed_offset, note))
                return Code.none
            self._groups.set_committed(group, log.name, one.committed_offset, note)
        except PenstockError as error:
            return code_of(error)
        return Code.none

    @with_code
    async def offset_fetch(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        self._require(connection, Role.READ_ONLY)
        shared: dict[str, tuple[int, str]] = {}
        some = body.topics is None or any(self._topics.is_shared(one.name) for one in body.topics)
        if self._groups.shared is not None and self._topics.has_shared and some:
            rows = await self._groups.shared.positions(body.group_id)
            shared = {one.topic: (one.committed, one.note) for one in rows}
        if body.topics is None:
            asked: dict[str, list[int]] = {}
            local = [one.topic for one in self._groups.positions() if one.group == body.group_id]
            for label in (*local, *shared):
                topic, number = split_label(label)
                asked.setdefault(topic, []).append(number)
        else:
            asked = {topic.name: list(topic.partition_indexes) for topic in body.topics}
        return {
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        self._committed(body.group_id, topic, one, shared) for one in numbers
                    ],
                }
                for topic, numbers in asked.items()
            ]
        }

    def _committed(
        self, group: str, topic: str, number: int, shared: Mapping[str, tuple[int, str]]
    ) -> dict[str, Any]:
        label = partition_label(topic, number)
        local = self._groups.committed_offset(group, label)
        offset, note = shared.get(label, (-1, ""))
        return {
            "partition_index": number,
            "committed_offset": offset if local is None else local.offset,
            "metadata": note if local is None else local.note,
        }

    @with_code
    async def offset_delete(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        body = request.body
        self._require(connection, Role.ADMIN)
        if body.group_id not in await self._groups.all_names():
            return {"error_code": Code.group_id_not_found}
        if self._groups.assigned.has_members(body.group_id):
            return {"error_code": Code.non_empty_group}

        async def delete(name: str, one: Any) -> dict[str, Any]:
            label = partition_label(name, one.partition_index)
            code = await self._delete(connection, body.group_id, label)
            # Without a committed offset there is nothing to delete.
            return {"error_code": Code.none if code == Code.group_id_not_found else code}

        return {"topics": await each_partition(body.topics, delete)}

    # Lists

    @with_code
    async def list_groups(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        self._access.require(connection, Role.READ_ONLY, Code.cluster_authorization_failed)
        wanted = getattr(request.body, "states_filter", ())
        names = sorted({*await self._groups.all_names(), *self._groups.assigned.names()})
        described = [self._describe(name, known=True) for name in names]
        return {"groups": [one for one in described if not wanted or one["group_state"] in wanted]}

    async def describe_groups(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        groups = []
        for name in request.body.groups:
            try:
                self._require(connection, Role.READ_ONLY)
                known = name in await self._groups.all_names()
                groups.append(self._describe(name, known=known))
            except PenstockError as error:
                groups.append({"error_code": code_of(error), "group_id": name})
        return {"groups": groups}

    def _describe(self, name: str, *, known: bool) -> dict[str, Any]:
        group = self._groups.assigned.get(name)
        if group is None:
            state = "Stable" if self._groups.is_leased(name) else "Empty" if known else "Dead"
            return {"group_id": name, "group_state": state, "protocol_type": ""}
        members = [
            {
                "member_id": one.id,
                "group_instance_id": one.instance,
                "client_id": one.client,
                "client_host": f"/{one.host}",
                "member_metadata": one.protocols.get(group.protocol, b""),
                "member_assignment": one.assignment,
            }
            for one in group.members.values()
        ]
        return {
            "group_id": name,
            "group_state": group.state.value,
            "protocol_type": group.kind,
            "protocol_data": group.protocol,
            "members": members,
        }

    async def delete_groups(self, connection: KafkaConnection, request: KafkaRequest) -> Values:
        results = []
        for name in request.body.groups_names:
            code = await self._delete(connection, name)
            results.append({"group_id": name, "error_code": code})
        return {"results": results}

    async def _delete(
        self, connection: KafkaConnection, group: str, topic: str | None = None
    ) -> int:
        try:
            self._require(connection, Role.ADMIN)
            if self._groups.assigned.has_members(group):
                return Code.non_empty_group
            await self._groups.delete(group, topic)
            await self._access.note(connection, "topic-group.delete", group)
        except NotFound:
            return Code.group_id_not_found
        except PenstockError as error:
            return code_of(error)
        return Code.none


def _membership(body: Any) -> Membership:
    return Membership(body.member_id, body.generation_id, getattr(body, "group_instance_id", None))
